//! What the fuzz targets share: small volumes to start from, and what is done with one that opens.
//!
//! Everything is built with `--cfg fuzzing`, under which all checksums are equal (`ramet_block::checksum`): a mutated
//! image is one whose checksums were repaired, and reaches the decoders. So wrong bytes may be *returned* here; what
//! must not happen is a panic, a hang, or memory beyond what the volume can justify.
#![forbid(unsafe_code)]

mod base;
mod edit;
mod visit;

pub use base::{Base, base, open_files};
pub use edit::edit;
pub use visit::{scan_all, visit_tree, visit_volume};
