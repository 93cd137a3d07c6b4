//! The bottom of a Ramet volume: devices, extents, superblocks, checksums and compression.
//!
//! Nothing here knows about nodes, keys or files. Everything that decodes bytes from a device
//! returns an error for bytes it does not understand; none of it panics.
#![forbid(unsafe_code)]

mod behind;
mod checksum;
pub mod codec;
mod device;
mod extent;
mod file;
mod identity;
pub mod owner;
pub mod planted;
mod stack;
mod streams;
pub mod superblock;
mod syncs;
pub mod wire;

pub use checksum::{checksum, hash};
pub use codec::{Codec, NoSuchCodec, ZstdLevel};
pub use device::{Device, MemDevice, WriteCheck, is_no_space};
pub use extent::{Extent, ExtentError, PageRef};
pub use file::{Access, FileDevice, OpenError, create_image};
pub use identity::{Label, NotALabel, NotAUuid, Uuid};
pub use owner::{ClaimError, OwnedDevice};
pub use superblock::{FORMAT_VERSION, JournalPos, Superblock, SuperblockError};
pub use wire::{Reader, WireError, Writer};

/// Unit of allocation and of aligned device I/O, in bytes.
pub const BLOCK_BYTES: u64 = 4096;
