//! Experiments on clones at scale, each with the counts that it is judged by.
//!
//! The same code runs small as a test and large as
//! `cargo run --release -p ramet-sim --example scale`. Figures are counts of nodes, reads and
//! bytes; times are reported and never judged.

mod many;
mod measure;
mod ranges;
mod rounds;
mod zones;

pub use many::{Deletion, Many, ManySample, PrivatePart};
pub use ranges::{Lookups, Ranges, RangesReport};
pub use rounds::{Edited, Rounds, Sample, Turns};
pub use zones::{Zones, ZonesReport};
