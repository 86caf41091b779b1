//! Memory that a node of several cores exports at run time: every core has it before the caller is told, and none when
//! it comes back.

use core::time::Duration;
use std::time::Instant;

use o2poll::config::{Config, Machine};
use o2poll::dataplane::endpoint::{
    Entry, EntryOptions, Error, Event, MatchBits, Operation, Portal, Request, Submission, Token,
};
use o2poll::dataplane::memory::PageList;
use o2poll::dataplane::pool::Handle;
use o2poll::dataplane::wire::Nid;
use o2poll::{Control, Link, Nobody, Options};

const PATIENCE: Duration = Duration::from_secs(30);

/// A server on two cores, a client on one, and a connection of the client to each core.
struct Scene {
    control: Control<Nobody>,
    server: Nid,
    client: Nid,
    links: [Link; 2],
    memory: Option<&'static mut PageList<'static>>,
}

impl Scene {
    fn new() -> Option<Self> {
        let machine = Machine::this();
        let [first, second, ..] = machine.allowed_cores[..] else {
            eprintln!("not run: this process may use one core only");
            return None;
        };
        let nodes = format!(
            "device = {{ soft = {{ profile = \"frwr\" }} }}\n\
             memory = {{ huge_pages = \"off\", mlock = \"off\" }}\n\
             tunables = {{ idle = \"yield\" }}\n\
             [[node]]\nnid = \"10.0.0.1@o2ib\"\ncores = [{first}, {second}]\n\
             [[node]]\nnid = \"10.0.0.2@o2ib\"\n"
        );
        let config = Config::parse(&nodes, "nodes.toml".as_ref(), &machine)
            .unwrap_or_else(|report| panic!("{report}"));
        let (server, client) = (config.nodes[0].nid, config.nodes[1].nid);
        let options = Options {
            memory: 1 << 20,
            ..Options::default()
        };
        let mut control = Control::start_nodes(&config, &machine, &options).unwrap();
        let links = [(); 2].map(|()| control.connect(client, server, PATIENCE).unwrap());
        let memory = control.node(client).unwrap().memory(5000);
        Some(Self {
            control,
            server,
            client,
            links,
            memory,
        })
    }

    fn entry(&mut self, options: EntryOptions) -> Entry<'static> {
        let node = self.control.node(self.server).unwrap();
        Entry {
            token: Token(7),
            portal: Portal(60),
            match_bits: MatchBits(5),
            ignore_bits: MatchBits(0),
            from: Nid::ANY,
            options,
            memory: node.memory(8192).unwrap(),
        }
    }

    fn ask(&mut self, submission: Submission<'static>) -> Event<'static> {
        let node = self.control.node(self.server).unwrap();
        assert!(node.submit(submission).is_ok());
        self.control.wait(self.server, PATIENCE).unwrap()
    }

    fn attach(&mut self, entry: Entry<'static>) -> Handle {
        match self.ask(Submission::Attach(entry)) {
            Event::Attached { entry, token } => {
                assert_eq!(token, Token(7));
                entry
            }
            other => panic!("{other:?}"),
        }
    }

    /// What a PUT of that many bytes of `fill` over each connection comes to.
    fn put(&mut self, fill: u8) -> [Result<u32, Error>; 2] {
        self.links.map(|link| {
            let memory = self.memory.take().unwrap();
            memory.chunks_mut().for_each(|chunk| chunk.fill(fill));
            let request = Request {
                token: Token(1),
                connection: link.connection,
                portal: Portal(60),
                match_bits: MatchBits(5),
                remote_offset: 0,
                memory,
                operation: Operation::Put {
                    hdr_data: 0,
                    ack: true,
                },
                timeout: None,
            };
            let node = self.control.node(self.client).unwrap();
            let submission = Submission::Transfer(request);
            assert!(node.submit_to(link.core, submission).is_ok());
            match self.control.wait(self.client, PATIENCE).unwrap() {
                Event::Done {
                    outcome, memory, ..
                } => {
                    self.memory = Some(memory);
                    outcome
                }
                other => panic!("{other:?}"),
            }
        })
    }

    /// Nothing more is said.
    fn quiet(&mut self) {
        let until = Instant::now() + Duration::from_millis(50);
        while Instant::now() < until {
            self.control.turn().unwrap();
            let node = self.control.node(self.server).unwrap();
            assert!(node.event().is_none());
        }
    }

    fn stop(self) {
        let finished = self.control.stop(PATIENCE).unwrap();
        for node in &finished.nodes {
            assert!(node.is_empty(), "{:?}", node.cores);
        }
        let served = &finished.nodes[0].cores;
        assert!(served.iter().all(|core| core.connections == 1));
    }
}

/// As the kernel answers a PUT that matches nothing: without an error, and without a byte.
const NOTHING: Result<u32, Error> = Ok(0);

#[test]
fn memory_attached_at_run_time_is_served_by_every_core_until_it_is_detached() {
    let Some(mut scene) = Scene::new() else {
        return;
    };
    assert_eq!(scene.put(1), [NOTHING; 2]);
    let entry = scene.entry(EntryOptions::PUT);
    let name = scene.attach(entry);
    assert_eq!(scene.put(2), [Ok(5000); 2]);
    scene.quiet();

    let back = match scene.ask(Submission::Detach { entry: name }) {
        Event::Detached {
            entry: Some(entry),
            why: None,
        } => entry,
        other => panic!("{other:?}"),
    };
    assert_eq!(scene.put(3), [NOTHING; 2]);
    // It is the owner's again: to look at, and to take apart.
    assert_eq!((back.token, back.memory.length()), (Token(7), 8192));
    let found: Vec<u8> = back.memory.chunks().flatten().copied().collect();
    assert!(found[..5000].iter().all(|byte| *byte == 2));
    assert!(found[5000..].iter().all(|byte| *byte == 0));
    scene.quiet();
    // Its name is worth nothing any more, and its memory can be exported again.
    let again = scene.ask(Submission::Detach { entry: name });
    let gone = matches!(
        again,
        Event::Detached {
            entry: None,
            why: None
        }
    );
    assert!(gone, "{again:?}");
    scene.attach(back);
    assert_eq!(scene.put(4), [Ok(5000); 2]);
    scene.stop();
}

#[test]
fn memory_that_one_core_has_no_room_for_is_attached_on_none() {
    let Some(mut scene) = Scene::new() else {
        return;
    };
    // The second core is filled up by itself.
    let mut filled = 0;
    loop {
        let mut entry = scene.entry(EntryOptions::PUT);
        entry.portal = Portal(61);
        let node = scene.control.node(scene.server).unwrap();
        assert!(node.submit_to(1, Submission::Attach(entry)).is_ok());
        match scene.control.wait(scene.server, PATIENCE).unwrap() {
            Event::Attached { .. } => filled += 1,
            Event::Detached {
                why: Some(Error::NoRoom),
                ..
            } => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(filled > 0);
    let entry = scene.entry(EntryOptions::PUT);
    let event = scene.ask(Submission::Attach(entry));
    let Event::Detached {
        entry: Some(entry),
        why: Some(Error::NoRoom),
    } = event
    else {
        panic!("{event:?}");
    };
    assert_eq!(entry.memory.chunks().count(), 1, "it is the owner's");
    assert_eq!(scene.put(1), [NOTHING; 2]);
    scene.quiet();
    scene.stop();
}

#[test]
fn what_is_one_cores_business_is_refused_for_the_node_and_had_of_one_core() {
    let Some(mut scene) = Scene::new() else {
        return;
    };
    for options in [EntryOptions::ONCE, EntryOptions::LOCAL_OFFSET] {
        let entry = scene.entry(EntryOptions::PUT | options);
        let event = scene.ask(Submission::Attach(entry));
        let Event::Detached {
            entry: Some(entry),
            why: Some(Error::SeveralCores),
        } = event
        else {
            panic!("{event:?}");
        };
        assert_eq!(scene.put(1), [NOTHING; 2]);
        let node = scene.control.node(scene.server).unwrap();
        assert!(node.submit_to(1, Submission::Attach(entry)).is_ok());
        let event = scene.control.wait(scene.server, PATIENCE).unwrap();
        let Event::Attached { entry, .. } = event else {
            panic!("{event:?}");
        };
        let mut found = scene.put(1);
        found.sort_by_key(|outcome| outcome.unwrap());
        assert_eq!(found, [NOTHING, Ok(5000)]);
        let node = scene.control.node(scene.server).unwrap();
        if options == EntryOptions::LOCAL_OFFSET {
            assert!(node.submit_to(1, Submission::Detach { entry }).is_ok());
        }
        let event = scene.control.wait(scene.server, PATIENCE).unwrap();
        assert!(matches!(event, Event::Detached { entry: Some(_), .. }));
    }
    scene.stop();
}
