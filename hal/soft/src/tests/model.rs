//! Random programs against two plain arrays of bytes.

use std::vec::Vec;

use proptest::prelude::*;

use o2poll_dataplane::nic::{Completion, Layout, RKey, Region, Remote, Rights, SendWr, Sge, WrId};

use super::laws::{Frwr, FrwrInStorm, Kind, Mlx5, Mlx5InStorm, Two};
use crate::conformance::{Lane, MEMORY, Setup, Side, World, done};

/// Offset and length.
type Piece = (usize, u32);

#[derive(Clone, Debug)]
enum Step {
    /// A puts the key of a region over memory (killing what is there first).
    Register(usize, Vec<Piece>),
    /// A kills it.
    Invalidate(usize),
    /// B writes into a region, from this part of its length on.
    Write(usize, Vec<Piece>, u8, Option<u32>),
    /// B reads from it.
    Read(usize, Vec<Piece>, u8),
    /// B sends, and perhaps kills a region of A.
    Send(u32, Option<usize>),
}

fn piece() -> impl Strategy<Value = Piece> {
    let length = prop_oneof![1_u32..200, 1_u32..20_000];
    // Not the end of the memory: that is for receives.
    (0..MEMORY - 40_000, length)
}

fn step() -> impl Strategy<Value = Step> {
    let region = 0..3_usize;
    let pieces = |most| prop::collection::vec(piece(), 1..most);
    prop_oneof![
        3 => (region.clone(), pieces(9)).prop_map(|(r, p)| Step::Register(r, p)),
        1 => region.clone().prop_map(Step::Invalidate),
        4 => (region.clone(), pieces(6), any::<u8>(), any::<Option<u32>>())
            .prop_map(|(r, p, at, imm)| Step::Write(r, p, at, imm)),
        2 => (region.clone(), pieces(6), any::<u8>()).prop_map(|(r, p, at)| Step::Read(r, p, at)),
        2 => (0..5000_u32, prop::option::weighted(0.3, region))
            .prop_map(|(length, kill)| Step::Send(length, kill)),
    ]
}

/// A region as the model sees it: the place of each byte of its key, while it is live.
struct Known {
    region: Region,
    key: RKey,
    base: u64,
    live: Option<Vec<usize>>,
}

struct Machine<K: Kind> {
    world: World<Two<K>>,
    model: [Vec<u8>; 2],
    regions: Vec<Known>,
    next: u64,
    wanted: [Vec<Completion>; 2],
}

impl<K: Kind> Machine<K> {
    fn new() -> Self {
        let mut world = World::<Two<K>>::new(Setup::default());
        let model = [Side::A, Side::B].map(|side| {
            let bytes = crate::conformance::pattern(side as u32 + 1, MEMORY);
            crate::conformance::Bench::poke(&mut world.bench, side, 0, &bytes);
            bytes
        });
        let regions = (0..3_u64)
            .map(|n| {
                let (region, key) = world.adopt(Side::A, Lane::Main);
                let base = if K::PROFILE.capabilities.zero_based {
                    0
                } else {
                    n << 40 | 0x777
                };
                Known {
                    region,
                    key,
                    base,
                    live: None,
                }
            })
            .collect();
        Self {
            world,
            model,
            regions,
            next: 0,
            wanted: [Vec::new(), Vec::new()],
        }
    }

    fn list(&self, side: Side, pieces: &[Piece]) -> Vec<Sge> {
        let sge = |(offset, length): &Piece| {
            crate::conformance::Bench::sge(&self.world.bench, side, Lane::Main, *offset, *length)
        };
        pieces.iter().map(sge).collect()
    }

    /// Queues a request; every third is not signalled unless it is the last of its chain.
    fn queue(&mut self, side: Side, last: bool, wr: SendWr<'_>) {
        self.next += 1;
        let signalled = last || !self.next.is_multiple_of(3);
        self.world.queue(side, Lane::Main, self.next, signalled, wr);
        if signalled {
            self.wanted[side as usize].push(done(self.next));
        }
    }

    fn settle(&mut self) {
        for side in [Side::A, Side::B] {
            self.world.doorbell(side, Lane::Main).unwrap();
        }
        for side in [Side::A, Side::B] {
            let wanted = core::mem::take(&mut self.wanted[side as usize]);
            assert_eq!(self.world.expect(side, wanted.len()), wanted);
        }
    }

    /// A receive at the end of A's memory, and what it will say.
    fn expect_message(&mut self, length: u32, imm: Option<u32>, invalidated: Option<RKey>) {
        self.next += 1;
        let offset = MEMORY - 20_000;
        self.world
            .post(Side::A, Lane::Main, self.next, offset, 20_000);
        self.wanted[Side::A as usize].push(Completion::Received {
            id: WrId(self.next),
            length,
            imm,
            invalidated,
        });
    }

    /// Cuts pieces so that together they fit into what a region has from `at` on; and where that is.
    fn fit(&self, region: usize, pieces: &[Piece], at: u8) -> Option<(Vec<Piece>, usize)> {
        let places = self.regions[region].live.as_ref()?;
        let start = places.len() * usize::from(at) / 256;
        let mut left = (places.len() - start) as u32;
        let mut cut = Vec::new();
        for (offset, length) in pieces {
            let take = (*length).min(left);
            cut.push((*offset, take));
            left -= take;
        }
        Some((cut, start))
    }

    fn run(&mut self, step: &Step) {
        match step {
            Step::Register(at, pieces) => {
                let list = self.list(Side::A, pieces);
                let known = &mut self.regions[*at];
                let old = known.live.take().map(|_| known.key);
                known.key = known.key.rotated();
                let (region, key, base) = (known.region, known.key, known.base);
                let spread = |(offset, length): &Piece| *offset..*offset + *length as usize;
                let places: Vec<usize> = pieces.iter().flat_map(spread).collect();
                let length = places.len() as u32;
                known.live = Some(places);
                if let Some(key) = old {
                    self.queue(Side::A, false, SendWr::Invalidate { key });
                }
                let wr = SendWr::Register {
                    region,
                    key,
                    rights: Rights::REMOTE_WRITE | Rights::REMOTE_READ,
                    base,
                    length,
                    layout: Layout::Fragments(&list),
                };
                self.queue(Side::A, true, wr);
            }
            Step::Invalidate(at) => {
                let known = &mut self.regions[*at];
                if known.live.take().is_some() {
                    let key = known.key;
                    self.queue(Side::A, true, SendWr::Invalidate { key });
                }
            }
            Step::Write(at, pieces, from, imm) => {
                let Some((pieces, start)) = self.fit(*at, pieces, *from) else {
                    return;
                };
                let mut places = self.regions[*at].live.as_ref().unwrap()[start..].iter();
                for (offset, length) in &pieces {
                    for source in *offset..*offset + *length as usize {
                        self.model[0][*places.next().unwrap()] = self.model[1][source];
                    }
                }
                let remote = self.remote(*at, start);
                if imm.is_some() {
                    let length = pieces.iter().map(|piece| piece.1).sum();
                    self.expect_message(length, *imm, None);
                }
                let local = self.list(Side::B, &pieces);
                let wr = SendWr::Write {
                    local: &local,
                    remote,
                    imm: *imm,
                };
                self.queue(Side::B, true, wr);
            }
            Step::Read(at, pieces, from) => {
                let Some((pieces, start)) = self.fit(*at, pieces, *from) else {
                    return;
                };
                let mut places = self.regions[*at].live.as_ref().unwrap()[start..].iter();
                for (offset, length) in &pieces {
                    for sink in *offset..*offset + *length as usize {
                        self.model[1][sink] = self.model[0][*places.next().unwrap()];
                    }
                }
                let remote = self.remote(*at, start);
                let local = self.list(Side::B, &pieces);
                let wr = SendWr::Read {
                    local: &local,
                    remote,
                };
                self.queue(Side::B, true, wr);
            }
            Step::Send(length, kill) => {
                let invalidate = kill.and_then(|at| {
                    let known = &mut self.regions[at];
                    known.live.take().map(|_| known.key)
                });
                self.expect_message(*length, None, invalidate);
                let (sink, count) = (MEMORY - 20_000, *length as usize);
                let sent = self.model[1][..count].to_vec();
                self.model[0][sink..sink + count].copy_from_slice(&sent);
                let message = self.list(Side::B, &[(0, *length)])[0];
                let wr = SendWr::Send {
                    message,
                    invalidate,
                };
                self.queue(Side::B, true, wr);
            }
        }
    }

    fn remote(&self, at: usize, start: usize) -> Remote {
        Remote {
            address: self.regions[at].base + start as u64,
            rkey: self.regions[at].key,
        }
    }

    fn check(&mut self) {
        for side in [Side::A, Side::B] {
            let bytes = crate::conformance::Bench::peek(&self.world.bench, side, 0, MEMORY);
            assert!(bytes == self.model[side as usize], "side {side:?} differs");
        }
        let live = self.regions.iter().filter(|known| known.live.is_some());
        let gauges = crate::conformance::Bench::nic(&mut self.world.bench, Side::A).gauges();
        assert_eq!(gauges.live_keys, live.count());
        assert_eq!((gauges.receives, gauges.completions), (0, 0));
    }
}

fn of_a(step: &Step) -> bool {
    matches!(step, Step::Register(..) | Step::Invalidate(_))
}

fn obey<K: Kind>(steps: &[Step]) {
    let mut machine = Machine::<K>::new();
    // Steps of one side in a row go down in chains, up to what the queues hold.
    for run in steps.chunk_by(|one, next| of_a(one) == of_a(next)) {
        let most = if of_a(&run[0]) { 1 } else { 4 };
        for chain in run.chunks(most) {
            for step in chain {
                machine.run(step);
            }
            machine.settle();
        }
        machine.check();
    }
}

/// The last byte of a region may be written, the one behind it may not, wherever it is and whoever asks.
fn edge<K: Kind>(pieces: &[Piece], over: bool) {
    let mut machine = Machine::<K>::new();
    machine.run(&Step::Register(0, pieces.to_vec()));
    machine.settle();
    let length: u32 = pieces.iter().map(|piece| piece.1).sum();
    let at = length as usize - 1 + usize::from(over);
    let remote = machine.remote(0, at);
    if over {
        machine
            .world
            .assert_write_refused(Lane::Main, (5, 1), remote);
    } else {
        let (offset, length) = pieces[pieces.len() - 1];
        machine.model[0][offset + length as usize - 1] = machine.model[1][5];
        machine.world.write(Side::B, Lane::Main, 1, (5, 1), remote);
        assert_eq!(machine.world.expect(Side::B, 1), [done(1)]);
    }
    machine.check();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn programs_do_what_the_model_does_frwr(steps in prop::collection::vec(step(), 1..40)) {
        obey::<Frwr>(&steps);
    }

    #[test]
    fn programs_do_what_the_model_does_mlx5(steps in prop::collection::vec(step(), 1..40)) {
        obey::<Mlx5>(&steps);
    }

    #[test]
    fn programs_do_what_the_model_does_in_storm(steps in prop::collection::vec(step(), 1..25)) {
        obey::<FrwrInStorm>(&steps);
        obey::<Mlx5InStorm>(&steps);
    }

    #[test]
    fn the_edge_of_any_list_holds(
        pieces in prop::collection::vec(piece(), 1..30),
        over in any::<bool>(),
    ) {
        edge::<Frwr>(&pieces, over);
        edge::<Mlx5>(&pieces, over);
    }
}
