//! o2poll: LNet's o2iblnd in user space, as a library.
//!
//! (Being written.)

mod application;
pub mod capture;
mod control;
mod copy;
mod error;
mod fabric;
mod job;
mod measure;
mod node;
mod pattern;
mod plan;
mod polling;
mod progress;
mod report;
mod run;
mod workload;

pub use application::{Application, Notice, Port, Turn};
pub use control::{Control, Finished, FinishedNode, FinishedThread, Options};
pub use copy::{Copy, Hash};
pub use error::Error;
pub use job::{Job, NoPong, Ping, Pong, Progress, peers};
pub use measure::{Cost, Histogram, Span};
pub use node::{Device, Link, Node, Wires};
pub use progress::Bars;
pub use report::{
    CaptureLine, DigestLine, NodeLine, PingLine, Report, Scene, SpanLine, ThreadLine, Verdict,
    VerificationLine,
};
pub use run::{Watcher, outline, run};
pub use workload::Workload;
