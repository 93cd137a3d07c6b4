//! The bottom of a Ramet volume: devices, extents, superblocks, checksums and compression.
//!
//! Nothing here knows about nodes, keys or files. Everything that decodes bytes from a device
//! returns an error for bytes it does not understand; none of it panics.
#![forbid(unsafe_code)]

mod budget;
mod checksum;
pub mod codec;
mod device;
mod device_error;
pub mod encoding;
mod extent;
pub mod failpoints;
mod file;
mod fsync_errors;
mod identity;
mod lock_times;
mod memory_limit;
mod overlay;
pub mod owner;
mod readahead;
mod stack;
pub mod superblock;
mod write_behind;

pub use budget::{Budget, Held, Use};
pub use checksum::{checksum, hash};
pub use codec::{Codec, NoSuchCodec, ZstdLevel};
pub use device::{Device, MemDevice, WriteCheck, is_no_space};
pub use device_error::{Call, DeviceError};
pub use encoding::{DecodeError, Reader, Writer};
pub use extent::{Extent, ExtentError, PageRef};
pub use file::{Access, FileDevice, OpenError, create_image};
pub use identity::{Label, NotALabel, NotAUuid, Uuid};
pub use lock_times::{Hold, LockTimes, LongestTimes};
pub use memory_limit::{
    LIMIT_MIN as MEMORY_LIMIT_MIN, group_pressure_file, is_memory_low, memory_limit,
};
pub use overlay::Overlay;
pub use owner::{ClaimError, OwnedDevice};
pub use superblock::{FORMAT_VERSION, JournalPos, MetadataCopies, Superblock, SuperblockError};

/// Unit of allocation and of aligned device I/O, in bytes.
pub const BLOCK_BYTES: u64 = 4096;
