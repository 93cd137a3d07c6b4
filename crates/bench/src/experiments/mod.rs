//! The experiments: work, and the figures that it gives.
//!
//! Each is a function over a [`Run`]: it makes the stages that it needs, and tells its findings.
//! Names and sizes are those of the papers' evaluations: BetrFS 0.5, section 5 (clones: table 3,
//! figures 9 to 13; writes, greps and finds: tables 1 and 2) and BetrFS 0.2, section 7 (figures 4
//! to 10, tables 1 and 2).

mod all;
mod applications;
mod clones;
mod files;
mod operations;
mod run;
mod trees;

pub use all::run;
