//! Rounds of clone and edit (BetrFS 0.5, section 5.2, figure 10).
//!
//! A tree of directories and files is cloned again and again, and each round writes a few bytes
//! into each file of one version. The costs of a clone and of a scan of the newest version, and the
//! space of a round, must not depend on the number of rounds before. At the end the volume of the
//! first sample and that of the last go on by turns (`turns.rs`): only the times of clones there
//! can be compared.

mod history;
mod run;
mod turns;

pub use history::{Edited, Rounds};
pub use run::Sample;
pub use turns::Turns;
