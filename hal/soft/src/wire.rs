//! What carries packets from core to core.

use o2poll_dataplane::ring::{LapConsumer, LapProducer, LapSlot, Returned, lap_ring};

use crate::packet::Packet;

/// Carries packets between the devices of one fabric. Each device has numbered ports; a port leads to one
/// other device (or back to itself), in both directions.
///
/// A wire may lose, delay, repeat and reorder packets. It cannot make any.
pub trait Wire {
    /// How many ports there are.
    fn ports(&self) -> u16;

    /// Takes a packet; false when there is no room (or no such port), and the packet was not taken.
    fn send(&mut self, port: u16, packet: &Packet) -> bool;

    /// The oldest packet that has arrived on a port; the same again until [`pop`](Self::pop).
    fn peek(&mut self, port: u16) -> Option<Packet>;

    /// Asks for the bytes of the packets that `peek` will show after the next calls of `pop`, where there are some
    /// already. Called only while `peek` shows one.
    fn prefetch(&mut self, _port: u16) {}

    /// Forgets the packet that `peek` shows.
    fn pop(&mut self, port: u16);

    /// One poll of the device has begun: the only clock that a wire has.
    fn step(&mut self) {}
}

/// One end of a [`link`]: a lap ring out and one in.
pub struct Port<'r> {
    outbound: LapProducer<'r>,
    inbound: LapConsumer<'r>,
    /// The bytes of so many packets behind the oldest have been asked for.
    fetched: u16,
}

impl Port<'_> {
    /// Sends; false when the ring is full.
    #[inline]
    fn send(&mut self, packet: &Packet) -> bool {
        self.outbound.push(packet.words())
    }
}

/// Memory for one direction of a [`link`].
pub struct Lane<'r> {
    /// Credits on their way back.
    pub returned: &'r mut Returned,
    /// The ring: a power of two, at least 4 slots.
    pub slots: &'r mut [LapSlot],
}

/// Links two devices: one port for each. `None` when a lane has not a legal number of slots.
#[must_use]
pub fn link<'r>(there: Lane<'r>, back: Lane<'r>) -> Option<(Port<'r>, Port<'r>)> {
    let (near_out, far_in) = lap_ring(there.returned, there.slots)?;
    let (far_out, near_in) = lap_ring(back.returned, back.slots)?;
    Some((
        Port {
            outbound: near_out,
            inbound: near_in,
            fetched: 0,
        },
        Port {
            outbound: far_out,
            inbound: far_in,
            fetched: 0,
        },
    ))
}

/// A port that leads back to the device itself, for two queue pairs of one core.
#[must_use]
pub fn loopback(lane: Lane<'_>) -> Option<Port<'_>> {
    let (outbound, inbound) = lap_ring(lane.returned, lane.slots)?;
    Some(Port {
        outbound,
        inbound,
        fetched: 0,
    })
}

/// The wire of production: one [`Port`] to every other core.
pub struct Ports<'a, 'r> {
    ports: &'a mut [Port<'r>],
}

impl<'a, 'r> Ports<'a, 'r> {
    /// A port's number is its place in the slice.
    #[must_use]
    pub const fn new(ports: &'a mut [Port<'r>]) -> Self {
        Self { ports }
    }
}

impl Wire for Ports<'_, '_> {
    fn ports(&self) -> u16 {
        u16::try_from(self.ports.len()).unwrap_or(u16::MAX)
    }

    #[inline]
    fn send(&mut self, port: u16, packet: &Packet) -> bool {
        self.ports
            .get_mut(usize::from(port))
            .is_some_and(|port| port.send(packet))
    }

    #[inline]
    fn peek(&mut self, port: u16) -> Option<Packet> {
        let port = self.ports.get_mut(usize::from(port))?;
        let words = port.inbound.peek()?;
        let packet = Packet::from_words(words);
        if packet.is_none() {
            // Not a packet: nothing a device sent. Out of the way with it.
            port.inbound.pop();
        }
        packet
    }

    #[inline]
    fn prefetch(&mut self, port: u16) {
        let Some(port) = self.ports.get_mut(usize::from(port)) else {
            return;
        };
        while port.fetched < FETCHED
            && let Some(words) = port.inbound.peek_at(port.fetched.wrapping_add(1))
        {
            Packet::first_span(words).prefetch();
            port.fetched = port.fetched.wrapping_add(1);
        }
    }

    fn pop(&mut self, port: u16) {
        if let Some(port) = self.ports.get_mut(usize::from(port)) {
            port.inbound.pop();
            port.fetched = port.fetched.saturating_sub(1);
        }
    }
}

/// Packets behind the oldest whose bytes are asked for: it takes longer until they come than one packet is served.
const FETCHED: u16 = 3;

/// How bad a [`Lossy`] wire is. Chances are out of 256.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weather {
    /// Of losing a packet.
    pub drop: u8,
    /// Of sending it twice.
    pub repeat: u8,
    /// Of holding it back, so that later packets overtake it.
    pub delay: u8,
    /// Longest hold, in polls of the sender.
    pub hold: u8,
}

/// A wire that loses, repeats and delays what is sent, replayed exactly by its seed.
pub struct Lossy<W> {
    inner: W,
    weather: Weather,
    random: u64,
    now: u64,
    held: heapless::Vec<(u64, u16, Packet), 64>,
}

impl<W: Wire> Lossy<W> {
    /// Puts weather on the sending side of `inner`.
    #[must_use]
    pub const fn new(inner: W, weather: Weather, seed: u64) -> Self {
        Self {
            inner,
            weather,
            random: seed,
            now: 0,
            held: heapless::Vec::new(),
        }
    }

    /// Changes the weather: e.g. a cut cable and its repair.
    pub const fn set_weather(&mut self, weather: Weather) {
        self.weather = weather;
    }

    /// splitmix64.
    const fn draw(&mut self) -> u8 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z >> 56) as u8
    }
}

impl<W: Wire> Wire for Lossy<W> {
    fn ports(&self) -> u16 {
        self.inner.ports()
    }

    fn send(&mut self, port: u16, packet: &Packet) -> bool {
        if self.draw() < self.weather.drop {
            return true;
        }
        if self.draw() < self.weather.delay {
            let until = self
                .now
                .wrapping_add(1)
                .wrapping_add(u64::from(self.draw().min(self.weather.hold)));
            if self.held.push((until, port, *packet)).is_ok() {
                return true;
            }
        }
        if self.draw() < self.weather.repeat {
            self.inner.send(port, packet);
        }
        self.inner.send(port, packet)
    }

    fn peek(&mut self, port: u16) -> Option<Packet> {
        self.inner.peek(port)
    }

    fn pop(&mut self, port: u16) {
        self.inner.pop(port);
    }

    fn step(&mut self) {
        self.now = self.now.wrapping_add(1);
        let (now, inner) = (self.now, &mut self.inner);
        self.held
            .retain(|(until, port, packet)| *until > now || !inner.send(*port, packet));
        self.inner.step();
    }
}

#[cfg(test)]
mod tests {
    use super::{Lane, Lossy, Ports, Weather, Wire, link};
    use crate::packet::{Opcode, Packet};
    use o2poll_dataplane::ring::{LapSlot, Returned};
    use std::vec::Vec;

    #[test]
    fn weather_drops_repeats_and_reorders_and_replays_from_its_seed() {
        let run = |weather, seed| {
            let mut returned = [Returned::new(), Returned::new()];
            let [r0, r1] = &mut returned;
            let mut s0: Vec<LapSlot> = (0..4096).map(|_| LapSlot::new()).collect();
            let mut s1: Vec<LapSlot> = (0..4).map(|_| LapSlot::new()).collect();
            let lane = |returned, slots| Lane { returned, slots };
            let (near, far) = link(lane(r0, &mut s0), lane(r1, &mut s1)).unwrap();
            let (mut near, mut far) = ([near], [far]);
            let mut wire = Lossy::new(Ports::new(&mut near), weather, seed);
            let mut far = Ports::new(&mut far);
            for psn in 0..1000 {
                assert!(wire.send(0, &Packet::bare(Opcode::Ack, 1, 2, psn)));
                wire.step();
            }
            for _ in 0..300 {
                wire.step();
            }
            let mut seen = Vec::new();
            while let Some(packet) = far.peek(0) {
                seen.push(packet.psn());
                far.pop(0);
            }
            seen
        };
        let clear: Vec<u32> = (0..1000).collect();
        assert_eq!(run(Weather::default(), 1), clear);
        let drop = Weather {
            drop: 64,
            ..Weather::default()
        };
        let seen = run(drop, 1);
        assert!(seen.len() > 600 && seen.len() < 900 && seen.is_sorted());
        assert_eq!(seen, run(drop, 1));
        assert_ne!(seen, run(drop, 2));
        let repeat = Weather {
            repeat: 64,
            ..Weather::default()
        };
        assert!(run(repeat, 1).len() > 1100);
        let delay = Weather {
            delay: 64,
            hold: 9,
            ..Weather::default()
        };
        let seen = run(delay, 1);
        assert!(seen.len() == 1000 && !seen.is_sorted());
    }
}
