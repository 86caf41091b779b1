//! How two nodes come to terms: requests, refusals and answers as `dataplane::peer` has them, with no connection
//! manager between.

use o2poll_dataplane::peer::{
    Answer, Local, Next, Remembered, Terms, accepted, answer, rejected, request,
};

/// What `dialer` and `listener`, who know nothing of each other, agree on; in that order. And how often it was dialed.
///
/// # Errors
/// What there is to do instead.
pub fn dial(dialer: &Local, listener: &Local) -> Result<([Terms; 2], u32), Next> {
    let (mut ours, mut theirs) = (Remembered::new(), Remembered::new());
    let mut dials = 0;
    loop {
        dials += 1;
        let asked = request(dialer, &ours, listener.nid);
        match answer(&asked.private_data, None, listener, |_| Some(&mut theirs)) {
            Answer::Accept { terms, reply } => {
                let own =
                    accepted(&reply, &asked, dialer, &mut ours).expect("an answer of our own");
                return Ok(([own, terms], dials));
            }
            Answer::Reject { record, .. } => {
                let next = rejected(CONSUMER_DEFINED, &record, &asked, dialer, &mut ours);
                if next != Next::Redial {
                    return Err(next);
                }
            }
        }
    }
}

/// The connection manager's reason for a refusal with private data (IB spec, table "REJ reason codes").
const CONSUMER_DEFINED: u16 = 28;
