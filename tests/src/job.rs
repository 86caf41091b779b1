//! Random traffic beside a model: every job is a PUT or GET with memory of its own at both ends.

use o2poll_dataplane::endpoint::{
    Entry, EntryOptions, Error, Event, Incoming, Landed, MatchBits, Operation, Portal, Request,
    Submission, Token,
};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::wire::{IMMEDIATE_PAYLOAD, Nid, Pid};
use o2poll_soft::Faults;

use crate::plot::noise;
use crate::world::Patience;
use crate::{Backend, Cut, NAMES, Plot, World};

/// A PUT or GET to be made.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// The initiator.
    pub from: usize,
    /// What.
    pub operation: Operation,
    /// Bytes.
    pub length: u32,
    /// Offset in the target's buffer.
    pub remote_offset: u32,
    /// Bytes of the target's buffer behind what is moved.
    pub tail: u32,
    /// The initiator's memory.
    pub near: Cut,
    /// The target's memory.
    pub far: Cut,
    /// The target's application is told.
    pub told: bool,
    /// Steps of the world before it is submitted.
    pub gap: u32,
}

/// A job under way.
struct Running {
    job: Job,
    near: Plot,
    far: Plot,
    outcome: Option<Result<u32, Error>>,
    expected: Result<u32, Error>,
    landed: Vec<Landed>,
}

/// A run of jobs over one connection.
pub struct Jobs {
    running: Vec<Running>,
}

impl Job {
    /// All of the target's buffer at once, of which its application is told.
    #[must_use]
    pub const fn new(from: usize, operation: Operation, length: u32, near: Cut, far: Cut) -> Self {
        Self {
            from,
            operation,
            length,
            remote_offset: 0,
            tail: 0,
            near,
            far,
            told: true,
            gap: 0,
        }
    }

    const fn is_put(&self) -> bool {
        matches!(self.operation, Operation::Put { .. })
    }

    const fn is_large(&self) -> bool {
        self.length > IMMEDIATE_PAYLOAD
    }
}

impl Jobs {
    /// Runs all jobs at once (but for their gaps) and checks outcomes, events, and every byte at both ends.
    /// Between steps `meddle` may do to the world what must make no difference.
    pub fn run<B: Backend>(
        world: &mut World<B>,
        connection: [Handle; 2],
        jobs: &[Job],
        meddle: impl FnMut(&mut World<B>),
    ) {
        let ended = world.has_ended();
        let this = Self::drive(world, connection, jobs, meddle);
        assert!(ended || !world.has_ended(), "{}", world.picture());
        this.check(world);
    }

    /// As `run`, while `meddle` may cancel, close, break and stop things. Every job has exactly one event all the
    /// same; what it says is true; and no byte is other than it was or ought to be. How many have moved data.
    pub fn run_through<B: Backend>(
        world: &mut World<B>,
        connection: [Handle; 2],
        jobs: &[Job],
        meddle: impl FnMut(&mut World<B>),
    ) -> usize {
        let this = Self::drive(world, connection, jobs, meddle);
        this.check_loosely(world);
        let moved = |running: &&Running| matches!(running.outcome, Some(Ok(bytes)) if bytes != 0);
        this.running.iter().filter(moved).count()
    }

    fn drive<B: Backend>(
        world: &mut World<B>,
        connection: [Handle; 2],
        jobs: &[Job],
        mut meddle: impl FnMut(&mut World<B>),
    ) -> Self {
        let mut this = Self {
            running: Vec::new(),
        };
        for job in jobs {
            this.export(world, *job);
        }
        let lists: Vec<_> = jobs
            .iter()
            .enumerate()
            .map(|(index, job)| this.lend(world, index, *job))
            .collect();
        for (index, (job, memory)) in jobs.iter().zip(lists).enumerate() {
            for _ in 0..job.gap {
                meddle(world);
                world.step();
                this.listen(world);
            }
            let token = index as u64;
            world.nodes[job.from].submit(Submission::Transfer(Request {
                token: Token(token),
                connection: connection[job.from],
                portal: Portal(9),
                match_bits: MatchBits(token),
                remote_offset: job.remote_offset,
                memory,
                operation: job.operation,
                timeout: None,
            }));
        }
        let mut patience = Patience::new::<B>(STEPS);
        while !this.is_over() {
            if !patience.lasts() {
                panic!("stuck: {} {}", this.open(), world.picture());
            }
            meddle(world);
            world.step();
            this.listen(world);
        }
        world.asleep = [false; 2];
        for node in &mut world.nodes {
            if let Some(faults) = B::faults(node.poller.nic()) {
                *faults = Faults::default();
            }
        }
        world.rest();
        this.listen(world);
        this
    }

    /// Exports the target's memory of a job.
    fn export<B: Backend>(&mut self, world: &mut World<B>, job: Job) {
        let token = self.running.len() as u64;
        let target = 1 - job.from;
        let total = job.remote_offset + job.length + job.tail;
        let arena = &mut world.nodes[target].arena;
        let (memory, mut far) = Plot::new(arena, total, job.far);
        if !job.is_put() {
            let bytes = noise(total, token + 1);
            memory.write_at(0, &bytes);
            far.write(0, &bytes);
        }
        let mut options = if job.is_put() {
            EntryOptions::PUT
        } else {
            EntryOptions::GET
        };
        options.set(EntryOptions::EVENTS, job.told);
        world.nodes[target].submit(Submission::Attach(Entry {
            token: Token(token),
            portal: Portal(9),
            match_bits: MatchBits(token),
            ignore_bits: MatchBits(0),
            from: Nid::ANY,
            options,
            memory,
        }));
        world.step();
        match world.nodes[target].events.pop() {
            Some(Event::Attached { .. }) => {}
            other => panic!("not attached: {other:?}"),
        }
        let (_, empty) = Plot::new(&mut world.nodes[job.from].arena, 0, job.near);
        self.running.push(Running {
            job,
            near: empty,
            far,
            outcome: None,
            expected: Ok(job.length),
            landed: Vec::new(),
        });
    }

    /// Prepares the initiator's memory of a job, and says what is to come of it.
    fn lend<B: Backend>(
        &mut self,
        world: &mut World<B>,
        index: usize,
        job: Job,
    ) -> &'static mut o2poll_dataplane::memory::PageList<'static> {
        let (near_setup, far_setup) = (*world.setup_of(job.from), *world.setup_of(1 - job.from));
        let frags = near_setup.max_frags.min(far_setup.max_frags);
        let running = &mut self.running[index];
        let arena = &mut world.nodes[job.from].arena;
        let (memory, mut near) = Plot::new(arena, job.length, job.near);
        if job.is_put() {
            let bytes = noise(job.length, index as u64 + 77);
            memory.write_at(0, &bytes);
            near.write(0, &bytes);
            if job.is_large()
                && !running
                    .far
                    .has_way(&far_setup, frags, job.remote_offset, job.length)
            {
                running.expected = Err(Error::Peer(-93));
            } else {
                running.far.await_bytes(job.remote_offset, &bytes);
            }
        } else if job.is_large() && !near.has_way(&near_setup, frags, 0, job.length) {
            running.expected = Err(Error::Unmappable);
        } else {
            let total = job.remote_offset + job.length + job.tail;
            let bytes = noise(total, index as u64 + 1);
            let from = job.remote_offset as usize;
            near.await_bytes(0, &bytes[from..from + job.length as usize]);
        }
        running.near = near;
        memory
    }

    fn listen<B: Backend>(&mut self, world: &mut World<B>) {
        for (of, node) in world.nodes.iter_mut().enumerate() {
            while let Some(event) = node.events.pop() {
                match event {
                    Event::Done { token, outcome, .. } => {
                        let running = self.at(token.0);
                        assert_eq!(running.job.from, of);
                        assert!(running.outcome.replace(outcome).is_none(), "told twice");
                        // The event comes after the data: a GET's is here now.
                        if !running.job.is_put() && outcome.is_ok() {
                            running.near.check(&node.arena, "at the event");
                        }
                    }
                    Event::Landed(landed) => {
                        let running = self.at(landed.token.0);
                        assert_eq!(running.job.from, 1 - of);
                        if running.job.is_put() && landed.outcome.is_ok() {
                            running.far.check(&node.arena, "at the landing");
                        }
                        running.landed.push(landed);
                    }
                    other => panic!("nobody asked for {other:?}"),
                }
            }
        }
    }

    fn at(&mut self, token: u64) -> &mut Running {
        &mut self.running[usize::try_from(token).expect("a token of ours")]
    }

    fn is_over(&self) -> bool {
        self.running.iter().all(|running| running.outcome.is_some())
    }

    fn open(&self) -> String {
        self.running
            .iter()
            .filter(|running| running.outcome.is_none())
            .map(|running| format!("{:?}\n", running.job))
            .collect()
    }

    fn check_loosely<B: Backend>(&self, world: &World<B>) {
        for running in &self.running {
            let job = &running.job;
            let (near, far) = (
                &world.nodes[job.from].arena,
                &world.nodes[1 - job.from].arena,
            );
            running.near.check_loosely(near, "near");
            running.far.check_loosely(far, "far");
            assert!(running.landed.len() <= 1, "landed twice: {job:?}");
            let over = [
                Err(Error::Cancelled),
                Err(Error::TimedOut),
                Err(Error::ConnectionClosed),
                Err(Error::NotConnected),
            ];
            let outcome = running.outcome.expect("over");
            assert!(
                outcome == running.expected || over.contains(&outcome),
                "{outcome:?} {job:?}"
            );
            // A message without an ACK says only that it was sent, and so does a PUT into a staging buffer.
            let is_staged = world.setup_of(1 - job.from).shape.staging != 0;
            let is_told = match job.operation {
                Operation::Put { ack, .. } => ack || job.is_large() && !is_staged,
                Operation::Get { .. } => true,
            };
            if outcome.is_ok() && is_told {
                running.near.check(near, "near");
                running.far.check(far, "far");
            }
        }
    }

    fn check<B: Backend>(&self, world: &World<B>) {
        for (index, running) in self.running.iter().enumerate() {
            let job = &running.job;
            assert_eq!(running.outcome, Some(running.expected), "{job:?}");
            running.near.check(&world.nodes[job.from].arena, "near");
            running.far.check(&world.nodes[1 - job.from].arena, "far");
            let landed = job.told && running.expected.is_ok();
            let expected = Landed {
                token: Token(index as u64),
                operation: match job.operation {
                    Operation::Put { hdr_data, .. } => Incoming::Put { hdr_data },
                    Operation::Get { .. } => Incoming::Get,
                },
                nid: NAMES[job.from],
                pid: Pid::LUSTRE,
                match_bits: MatchBits(index as u64),
                offset: job.remote_offset,
                outcome: Ok(job.length),
            };
            let expected: &[Landed] = if landed { &[expected] } else { &[] };
            assert_eq!(running.landed, expected, "{job:?}");
        }
    }
}

/// Steps after which a run is stuck.
const STEPS: u32 = 200_000;
