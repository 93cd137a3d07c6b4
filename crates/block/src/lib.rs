//! The bottom of a Ramet volume: devices, extents, superblocks, checksums and compression.
#![forbid(unsafe_code)]

mod device;

pub use device::{Device, MemDevice};

/// Unit of allocation and of aligned device I/O, in bytes.
pub const BLOCK_BYTES: u64 = 4096;
