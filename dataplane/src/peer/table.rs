//! What each event of the connection manager means in each state of a connection.
//!
//! Crashes of ko2iblnd came from events in states where nobody expected them (LU-15885, LU-17325,
//! LU-17632, LU-18260, LU-18899, LU-19625), and from ids that two parties destroyed (LU-10015,
//! LU-18897, LU-20476). So every cell is written out, an end is told exactly once, and the only
//! thing that destroys an id is [`Event::Drained`] after the end.

/// Where a connection stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// An id exists; address and route are being resolved, or a request just came with it.
    Init,
    /// REQ sent, or about to be.
    ActiveConnect,
    /// Request answered; the RTU has not come yet.
    PassiveWait,
    /// Messages flow.
    Established,
    /// This node has begun to disconnect; the core drains the queue pair.
    Closing,
    /// The connection manager is done with it; the core drains the queue pair.
    Disconnected,
    /// The id is destroyed.
    Gone,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// RDMA_CM_EVENT_CONNECT_REQUEST, for the new id that comes with it.
    ConnectRequest,
    /// RDMA_CM_EVENT_ADDR_RESOLVED.
    AddrResolved,
    /// RDMA_CM_EVENT_ADDR_ERROR.
    AddrError,
    /// RDMA_CM_EVENT_ROUTE_RESOLVED.
    RouteResolved,
    /// RDMA_CM_EVENT_ROUTE_ERROR.
    RouteError,
    /// RDMA_CM_EVENT_CONNECT_RESPONSE: a REP, for a queue pair that the connection manager does not
    /// own.
    ConnectResponse,
    /// RDMA_CM_EVENT_CONNECT_ERROR.
    ConnectError,
    /// RDMA_CM_EVENT_UNREACHABLE.
    Unreachable,
    /// RDMA_CM_EVENT_REJECTED.
    Rejected,
    /// RDMA_CM_EVENT_ESTABLISHED.
    Established,
    /// RDMA_CM_EVENT_DISCONNECTED.
    Disconnected,
    /// RDMA_CM_EVENT_DEVICE_REMOVAL.
    DeviceRemoval,
    /// RDMA_CM_EVENT_ADDR_CHANGE.
    AddrChange,
    /// RDMA_CM_EVENT_TIMEWAIT_EXIT.
    TimewaitExit,
    /// IBV_EVENT_COMM_EST: data arrived before the RTU.
    CommEst,
    /// This node's own timer for making the connection ran out. The connection manager's takes
    /// minutes (LU-17480).
    Deadline,
    /// Something in this node wants the end: the core saw an error, the operator asked, the answer or
    /// the request was refused, the peer has restarted.
    Close,
    /// The core has given the queue pair back, or never had it.
    Drained,
}

/// What to do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Nothing: it had to be expected.
    Ignore,
    /// Nothing, but it is worth a line in the log.
    Note,
    /// Resolve the route.
    ResolveRoute,
    /// Create the queue pair, give it to a core, and when it is ready send the
    /// [`request`](super::request).
    Connect,
    /// Ask [`answer`](super::answer). Accept, or reject and go on with [`Event::Close`].
    Answer,
    /// Ask [`accepted`](super::accepted). Complete the connection and tell the core, or go on with
    /// [`Event::Close`].
    Agree,
    /// Tell the connection manager that the connection is there (`rdma_notify`): the RTU got lost, and
    /// it will say ESTABLISHED (LU-8303).
    Notify,
    /// Tell the core that messages may flow.
    Establish,
    /// The connection, or the attempt, has ended: told once. Disconnect where the next state is
    /// [`State::Closing`], let the core drain the queue pair, go on with [`Event::Drained`].
    End(End),
    /// Destroy queue pair and id. Nobody else does. After [`End::Rejected`], ask what
    /// [`rejected`](super::rejected) said comes next.
    Destroy,
}

/// How a connection, or an attempt to make one, ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// The address could not be resolved (EHOSTUNREACH).
    NoAddress,
    /// No route (EHOSTUNREACH).
    NoRoute,
    /// The handshake failed (ENOTCONN).
    ConnectError,
    /// The peer does not answer (ENETDOWN).
    Unreachable,
    /// Refused: [`rejected`](super::rejected) knows what now.
    Rejected,
    /// Broken off before it was established (ECONNRESET).
    Reset,
    /// The peer closed it.
    ByPeer,
    /// This node closed it.
    ByUs,
    /// Not made in time (ETIMEDOUT).
    TimedOut,
    /// Its device is being removed (ENODEV).
    DeviceRemoved,
}

/// What `event` means in `state`: where that leads, and what to do.
#[must_use]
pub const fn step(state: State, event: Event) -> (State, Step) {
    use Event as E;
    use State::{ActiveConnect, Closing, Disconnected, Established, Gone, Init, PassiveWait};
    match event {
        E::ConnectRequest => match state {
            Init => (PassiveWait, Step::Answer),
            // A request brings its own id; it is never about one that is in use.
            ActiveConnect | PassiveWait | Established => (state, Step::Note),
            Closing | Disconnected | Gone => (state, Step::Ignore),
        },
        E::AddrResolved => match state {
            Init => (Init, Step::ResolveRoute),
            ActiveConnect | PassiveWait | Established => (state, Step::Note),
            Closing | Disconnected | Gone => (state, Step::Ignore),
        },
        E::AddrError => match state {
            Init => (Disconnected, Step::End(End::NoAddress)),
            ActiveConnect | PassiveWait | Established => (state, Step::Note),
            Closing | Disconnected | Gone => (state, Step::Ignore),
        },
        E::RouteResolved => match state {
            Init => (ActiveConnect, Step::Connect),
            ActiveConnect | PassiveWait | Established => (state, Step::Note),
            Closing | Disconnected | Gone => (state, Step::Ignore),
        },
        E::RouteError => match state {
            Init => (Disconnected, Step::End(End::NoRoute)),
            ActiveConnect | PassiveWait | Established => (state, Step::Note),
            Closing | Disconnected | Gone => (state, Step::Ignore),
        },
        E::ConnectResponse => match state {
            ActiveConnect => (Established, Step::Agree),
            Init | PassiveWait | Established => (state, Step::Note),
            Closing | Disconnected | Gone => (state, Step::Ignore),
        },
        E::ConnectError => match state {
            ActiveConnect => (Disconnected, Step::End(End::ConnectError)),
            PassiveWait => (Closing, Step::End(End::ConnectError)),
            Init | Established => (state, Step::Note),
            Closing | Disconnected | Gone => (state, Step::Ignore),
        },
        E::Unreachable => match state {
            ActiveConnect => (Disconnected, Step::End(End::Unreachable)),
            PassiveWait => (Closing, Step::End(End::Unreachable)),
            Init | Established => (state, Step::Note),
            Closing | Disconnected | Gone => (state, Step::Ignore),
        },
        E::Rejected => match state {
            ActiveConnect => (Disconnected, Step::End(End::Rejected)),
            // The peer did not like our REP.
            PassiveWait => (Disconnected, Step::End(End::Reset)),
            Init | Established => (state, Step::Note),
            // LU-18260: a REJ for an attempt that is being given up.
            Closing | Disconnected | Gone => (state, Step::Ignore),
        },
        E::Established => match state {
            // The REP, where the connection manager owns the queue pair.
            ActiveConnect => (Established, Step::Agree),
            PassiveWait => (Established, Step::Establish),
            Init => (state, Step::Note),
            // After CONNECT_RESPONSE, or after a Notify that the RTU overtook.
            Established => (state, Step::Ignore),
            Closing | Disconnected | Gone => (state, Step::Ignore),
        },
        E::Disconnected => match state {
            ActiveConnect | PassiveWait => (Disconnected, Step::End(End::Reset)),
            // A DREQ wants an answer: disconnecting sends it.
            Established => (Closing, Step::End(End::ByPeer)),
            Init => (state, Step::Note),
            Closing => (Disconnected, Step::Ignore),
            // LU-18897, LU-20476: once only.
            Disconnected | Gone => (state, Step::Ignore),
        },
        E::DeviceRemoval => match state {
            Init | ActiveConnect => (Disconnected, Step::End(End::DeviceRemoved)),
            // ko2iblnd only asks the operator to shut LNet down; a process must let go of the device,
            // or its removal hangs.
            PassiveWait | Established => (Closing, Step::End(End::DeviceRemoved)),
            Closing | Disconnected | Gone => (state, Step::Ignore),
        },
        E::AddrChange => match state {
            Init | ActiveConnect | PassiveWait | Established => (state, Step::Note),
            Closing | Disconnected | Gone => (state, Step::Ignore),
        },
        E::TimewaitExit => match state {
            Init | ActiveConnect | PassiveWait | Established | Closing | Disconnected | Gone => {
                (state, Step::Ignore)
            }
        },
        E::CommEst => match state {
            PassiveWait => (PassiveWait, Step::Notify),
            Init | ActiveConnect => (state, Step::Note),
            Established | Closing | Disconnected | Gone => (state, Step::Ignore),
        },
        E::Deadline => match state {
            Init | ActiveConnect => (Disconnected, Step::End(End::TimedOut)),
            PassiveWait => (Closing, Step::End(End::TimedOut)),
            Established | Closing | Disconnected | Gone => (state, Step::Ignore),
        },
        E::Close => match state {
            Init | ActiveConnect => (Disconnected, Step::End(End::ByUs)),
            PassiveWait | Established => (Closing, Step::End(End::ByUs)),
            Closing | Disconnected | Gone => (state, Step::Ignore),
        },
        E::Drained => match state {
            // A core gives nothing back that it was not asked for.
            Init | ActiveConnect | PassiveWait | Established => (state, Step::Note),
            Closing | Disconnected => (Gone, Step::Destroy),
            // LU-10015, LU-18897: not twice.
            Gone => (Gone, Step::Ignore),
        },
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::{End, Event, State, Step, step};

    const STATES: [State; 7] = [
        State::Init,
        State::ActiveConnect,
        State::PassiveWait,
        State::Established,
        State::Closing,
        State::Disconnected,
        State::Gone,
    ];
    const EVENTS: [Event; 18] = [
        Event::ConnectRequest,
        Event::AddrResolved,
        Event::AddrError,
        Event::RouteResolved,
        Event::RouteError,
        Event::ConnectResponse,
        Event::ConnectError,
        Event::Unreachable,
        Event::Rejected,
        Event::Established,
        Event::Disconnected,
        Event::DeviceRemoval,
        Event::AddrChange,
        Event::TimewaitExit,
        Event::CommEst,
        Event::Deadline,
        Event::Close,
        Event::Drained,
    ];

    const fn age(state: State) -> u8 {
        match state {
            State::Init => 0,
            State::ActiveConnect | State::PassiveWait => 1,
            State::Established => 2,
            State::Closing => 3,
            State::Disconnected => 4,
            State::Gone => 5,
        }
    }

    const fn lives(state: State) -> bool {
        age(state) < age(State::Closing)
    }

    #[test]
    fn every_cell_keeps_the_rules() {
        // If a state or an event is added, the arrays above are too short.
        assert_eq!(State::Gone as usize + 1, STATES.len());
        assert_eq!(Event::Drained as usize + 1, EVENTS.len());
        for state in STATES {
            for event in EVENTS {
                let (next, what) = step(state, event);
                let cell = (state, event, next, what);
                assert!(
                    next == state || age(next) > age(state),
                    "goes back: {cell:?}"
                );
                assert_eq!(
                    matches!(what, Step::End(_)),
                    lives(state) && !lives(next),
                    "the end is told when it happens, and only then: {cell:?}"
                );
                assert_eq!(
                    what == Step::Destroy,
                    state != State::Gone && next == State::Gone,
                    "{cell:?}"
                );
                assert_eq!(
                    what == Step::Destroy,
                    event == Event::Drained && !lives(state) && state != State::Gone,
                    "one owner, one occasion: {cell:?}"
                );
                assert_eq!(
                    matches!(what, Step::Establish | Step::Agree),
                    state != State::Established && next == State::Established,
                    "{cell:?}"
                );
                if !lives(state) && what != Step::Destroy {
                    assert_eq!(what, Step::Ignore, "after the end: {cell:?}");
                }
                if what == Step::Note {
                    assert_eq!(next, state, "what is only noted changes nothing: {cell:?}");
                }
            }
        }
    }

    #[test]
    fn every_live_state_can_be_ended_by_this_node_by_removal_and_by_no_late_timer() {
        for state in STATES.into_iter().filter(|state| lives(*state)) {
            for event in [Event::Close, Event::DeviceRemoval] {
                let (next, what) = step(state, event);
                assert!(matches!(what, Step::End(_)), "{state:?} {event:?}");
                assert_eq!(step(next, Event::Drained), (State::Gone, Step::Destroy));
            }
        }
        let late = step(State::Established, Event::Deadline);
        assert_eq!(late, (State::Established, Step::Ignore));
    }

    #[test]
    fn any_four_events_from_any_state_end_and_destroy_at_most_once() {
        let mut runs = 0;
        for start in STATES {
            for first in EVENTS {
                for second in EVENTS {
                    for third in EVENTS {
                        for fourth in EVENTS {
                            let (mut ends, mut destroyed) = (0, 0);
                            let mut state = start;
                            for event in
                                [first, second, third, fourth, Event::Close, Event::Drained]
                            {
                                let (next, what) = step(state, event);
                                ends += u32::from(matches!(what, Step::End(_)));
                                destroyed += u32::from(what == Step::Destroy);
                                state = next;
                            }
                            assert_eq!(state, State::Gone);
                            assert_eq!(ends, u32::from(lives(start)));
                            assert_eq!(destroyed, u32::from(start != State::Gone));
                            runs += 1;
                        }
                    }
                }
            }
        }
        assert_eq!(runs, 7 * 18_u32.pow(4));
    }

    /// Runs events from the start; what each asked for.
    fn run(events: &[Event]) -> Vec<Step> {
        let mut state = State::Init;
        events
            .iter()
            .map(|event| {
                let (next, what) = step(state, *event);
                state = next;
                what
            })
            .collect()
    }

    #[test]
    fn the_usual_lives_of_a_connection() {
        let dialed = [
            Event::AddrResolved,
            Event::RouteResolved,
            Event::ConnectResponse,
            Event::Disconnected,
            Event::TimewaitExit,
            Event::Drained,
        ];
        let steps = [
            Step::ResolveRoute,
            Step::Connect,
            Step::Agree,
            Step::End(End::ByPeer),
            Step::Ignore,
            Step::Destroy,
        ];
        assert_eq!(run(&dialed), steps);

        let refused = [
            Event::AddrResolved,
            Event::RouteResolved,
            Event::Rejected,
            Event::Rejected,
            Event::Drained,
            Event::Drained,
        ];
        let steps = [
            Step::ResolveRoute,
            Step::Connect,
            Step::End(End::Rejected),
            Step::Ignore,
            Step::Destroy,
            Step::Ignore,
        ];
        assert_eq!(run(&refused), steps);

        // The RTU is lost: data make up for it (LU-8303).
        let answered = [
            Event::ConnectRequest,
            Event::CommEst,
            Event::Established,
            Event::Close,
            Event::Disconnected,
            Event::Drained,
        ];
        let steps = [
            Step::Answer,
            Step::Notify,
            Step::Establish,
            Step::End(End::ByUs),
            Step::Ignore,
            Step::Destroy,
        ];
        assert_eq!(run(&answered), steps);
    }
}
