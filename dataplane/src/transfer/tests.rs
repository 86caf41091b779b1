//! The table of the sequence.

use super::{Input, Phase, Step, step};

const PHASES: [Phase; 19] = [
    Phase::Waiting,
    Phase::MapRequest,
    Phase::MapAnswer,
    Phase::Request,
    Phase::AskedPut,
    Phase::AskedGet,
    Phase::AskedReply,
    Phase::Data,
    Phase::Sent,
    Phase::SentWantsAck,
    Phase::AwaitAck,
    Phase::Answer,
    Phase::Answered,
    Phase::Invalidate,
    Phase::Invalidating,
    Phase::Copying,
    Phase::Settling,
    Phase::Lost,
    Phase::Rebuilding,
];
const INPUTS: [Input; 25] = [
    Input::Admitted,
    Input::Unmapped,
    Input::Mapped,
    Input::Unmappable,
    Input::PostedPutReq,
    Input::PostedGetReq,
    Input::PostedGet,
    Input::PostedPutAck,
    Input::PostedLast,
    Input::PostedLastWantsAck,
    Input::PostedInvalidate,
    Input::Completed,
    Input::PutAck,
    Input::PutNak,
    Input::PutDone,
    Input::GetDone,
    Input::Reply,
    Input::ReplyRequest,
    Input::Ack,
    Input::Dead,
    Input::Staged,
    Input::Copied,
    Input::Expired,
    Input::Revoked,
    Input::ConnectionLost,
];

fn run(inputs: &[Input]) -> (Phase, Step) {
    inputs
        .iter()
        .fold((Phase::Waiting, Step::Wait), |(phase, _), input| {
            step(phase, *input)
        })
}

#[test]
fn the_sequences_of_the_protocol() {
    use Input as I;
    let over = (Phase::Settling, Step::Finish);
    for sequence in [
        // PUT, bulk, the answer before and after the end of the request.
        &[
            I::Admitted,
            I::PostedPutReq,
            I::Completed,
            I::PutAck,
            I::PostedLast,
            I::Completed,
        ][..],
        &[
            I::Admitted,
            I::PostedPutReq,
            I::PutAck,
            I::Completed,
            I::PostedLast,
            I::Completed,
        ],
        &[
            I::Admitted,
            I::PostedPutReq,
            I::PutAck,
            I::PostedLastWantsAck,
            I::Ack,
            I::Completed,
        ],
        &[
            I::Admitted,
            I::PostedPutReq,
            I::PutAck,
            I::PostedLastWantsAck,
            I::Completed,
            I::Ack,
        ],
        &[I::Admitted, I::PostedPutReq, I::PutNak],
        // PUT as a message.
        &[I::Admitted, I::PostedLast, I::Completed],
        // GET, bulk: our invalidate, and the peer's.
        &[
            I::Admitted,
            I::PostedGetReq,
            I::GetDone,
            I::PostedInvalidate,
            I::Dead,
        ],
        &[I::Admitted, I::PostedGetReq, I::GetDone, I::Dead],
        // The same, with a mapping that the control side makes, and with one that it cannot make.
        &[I::Unmapped, I::Mapped, I::PostedGetReq, I::GetDone, I::Dead],
        &[I::Unmapped, I::Unmappable],
        &[I::Unmapped, I::Expired],
        &[
            I::Admitted,
            I::PostedGet,
            I::Unmapped,
            I::Completed,
            I::Mapped,
            I::PostedPutAck,
            I::PutDone,
            I::Dead,
        ],
        &[
            I::Admitted,
            I::PostedGet,
            I::Unmapped,
            I::Expired,
            I::Unmappable,
        ],
        // GET as a message: the REPLY in a message, and in a PUT_REQ.
        &[I::Admitted, I::PostedGet, I::Completed, I::Reply],
        &[
            I::Admitted,
            I::PostedGet,
            I::ReplyRequest,
            I::PostedPutAck,
            I::PutDone,
            I::PostedInvalidate,
            I::Dead,
        ],
    ] {
        assert_eq!(run(sequence), over, "{sequence:?}");
    }
}

/// Rule 6: while the peer may use a key, time alone frees nothing.
#[test]
fn time_ends_nothing_whose_key_may_be_alive() {
    for phase in [
        Phase::AskedGet,
        Phase::Answered,
        Phase::Invalidate,
        Phase::Invalidating,
    ] {
        assert_eq!(step(phase, Input::Expired), (phase, Step::Wait));
    }
}

#[test]
fn only_an_expected_answer_moves_anything() {
    for phase in PHASES {
        for input in [Input::PutAck, Input::PutNak, Input::PutDone, Input::GetDone] {
            let expected = matches!(
                (phase, input),
                (Phase::AskedPut, Input::PutAck | Input::PutNak)
                    | (Phase::Answered, Input::PutDone)
                    | (Phase::AskedGet, Input::GetDone)
            );
            let over = matches!(phase, Phase::Lost | Phase::Rebuilding);
            let (next, then) = step(phase, input);
            match (expected, over) {
                (true, _) => assert_ne!(next, phase),
                (false, true) => assert_eq!((next, then), (phase, Step::Ignore)),
                (false, false) => assert_eq!((next, then), (phase, Step::Violation)),
            }
        }
    }
}

#[test]
fn a_lost_connection_takes_every_living_transfer() {
    for phase in PHASES {
        let (next, _) = step(phase, Input::ConnectionLost);
        assert!(matches!(next, Phase::Lost | Phase::Rebuilding));
    }
}

#[test]
fn memory_is_finished_only_where_no_key_can_be_alive() {
    for phase in PHASES {
        for input in INPUTS {
            if let (_, Step::Finish) = step(phase, input) {
                assert!(
                    !matches!(phase, Phase::AskedGet | Phase::Answered)
                        && (!matches!(phase, Phase::Invalidate | Phase::Invalidating)
                            || input == Input::Dead),
                    "{phase:?} {input:?}"
                );
            }
        }
    }
}
