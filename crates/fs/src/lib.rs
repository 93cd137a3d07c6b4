//! The file system of a Ramet volume: paths, inodes, data and clones on the tree.
//!
//! A [`Volume`] hands out the components that do the work: [`Names`], [`Directories`], [`Files`],
//! [`Attributes`], [`Trees`] and [`Controls`]. They offer the operations of FUSE, by inode number,
//! and clones. All keys are in one key space (`format/keys.rs`, `format/record.rs`), and every
//! operation is one batch of the tree. `docs/fs.md` has the semantics.
//!
//! # Locks
//!
//! Locks are taken in this order, each kind in the order of inode numbers. No lock is taken before
//! one that is already held:
//!
//! 1. the counter of inode numbers: held over a batch of its own, once in 65,536 numbers, and with
//!    no other lock;
//! 2. the comparison and the scrub of an open directory ([`ControlState`]), and the positions of a
//!    directory stream;
//! 3. `Inode::names` of directories: their entries. Held over the check whether a name exists and
//!    the change that follows; may wait for the device;
//! 4. `Namespace::links`: the names of hard links; may wait for the device;
//! 5. `Inode::state`: the record and the contents; may wait for the device;
//! 6. `Inode::has_links`: whether a clone root has hard links; may wait for the device. A new hard
//!    link sets it with the topology held: `links` keeps it apart from the lookup that waits for
//!    the topology;
//! 7. `Namespace::topology`: the locations of inodes. Held for reading while keys are made and the
//!    batch is applied or a snapshot is taken, for writing while directories move: memory only.
//!    Clones, renames and removals of trees hold it, or 4, for writing. Their batches may need nodes
//!    or room first. The operation then lets all its locks go, has the work done, begins anew
//!    ([`Namespace::until_applied`](namespace::resolve::Namespace::until_applied));
//! 8. the counts of protected inodes: held over a batch, with the topology held for reading;
//! 9. `Inode::location`, `Inode::cached_path`, `Inode::count`, the shards and hints of the table,
//!    the deferred deletes, the salts: for a moment, one at a time.
//!
//! [`ramet_betree::Tree::admit`], which waits for room, comes before 2 to 9. The one exception is a
//! clone of a directory with many hard links below: it waits for room with locks of the kinds 3 to
//! 5 (`ops/hard_links.rs`).
#![forbid(unsafe_code)]

mod clock;
mod error;
mod examine;
mod format;
mod namespace;
mod ops;
mod options;
mod tools;
mod volume;

pub use ramet_betree::{SHUT_DOWN, TreeShape, Usage};

pub use tools::{control, fence};

pub use clock::{Clock, SystemClock};
pub use error::{Error, Result};
pub use examine::{Examination, ExaminationStep, ExamineError, Examined, examine};
pub use format::blocks::{BLOCK_BYTES, FILE_BYTES_MAX};
pub use format::ino::{Ino, ROOT_INO};
pub use format::name::NAME_BYTES_MAX;
pub use format::record::{Kind, Time};
pub use namespace::attr::Attr;
pub use ops::access::{Caller, Capabilities, Credentials, NOBODY, Writer};
pub use ops::attr::{Attributes, SetAttr, SetTime};
pub use ops::clone::CloneMode;
pub use ops::copy_range::Copied;
pub use ops::create::NewInode;
pub use ops::data::Files;
pub use ops::file_flags::FileFlags;
pub use ops::names::Names;
pub use ops::readdir::{DirEntry, DirStream, Directories};
pub use ops::rename::RenameMode;
pub use ops::trees::{Invalidation, Trees};
pub use ops::xattr::{SetXattr, XATTR_BYTES_MAX};
pub use options::{AccessTime, FormatOptions, LockStats, MemoryStats, OpenOptions, VolumeStats};
pub use tools::check::Finding;
pub use tools::controls::{ControlState, Controls};
pub use tools::diff::{Change, Difference};
pub use tools::mkfs::UnfinishedVolume;
pub use tools::scrub::{Damaged, ScrubPage};
pub use volume::Volume;
