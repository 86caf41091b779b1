//! Cycle-level microbenchmarks of o2poll, with floors and rivals measured in the same run.
//!
//! ```sh
//! cargo run --release -p o2poll-bench -- [FILTER] [--quick] [--json FILE] [--list]
//! ```
//!
//! * [`tsc`]: the time stamp counter, its calibration, involuntary context switches
//! * [`stats`]: least, median, 99th percentile
//! * [`harness`]: rows and contenders, and the loop that lets them take turns
//! * [`machine`]: what the figures were measured on, and how idle it was
//! * [`nodes`]: whole nodes over the software device, for rows of transfers
//! * [`table`]: the report, as text and as JSON
//! * [`rows`]: what is measured; a new row goes there
//!
//! A figure is good within its row only: the contenders of one row took turns, sample by sample.
//! Between rows, and all the more between runs, the machine was another.

pub mod harness;
pub mod machine;
pub mod nodes;
pub mod rows;
pub mod stats;
pub mod table;
pub mod tsc;
