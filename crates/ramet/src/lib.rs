//! Ramet as a library: an ordered store of keys and values, in one file or on one block device,
//! whose ranges are *cloned* in constant time.
//!
//! A clone is a copy. It can be written, does not depend on its source, is as fast to read, and
//! takes space only for the changes on either side. Keys are byte strings up to [`KEY_BYTES_MAX`],
//! values up to [`VALUE_BYTES_MAX`]. The library needs no FUSE and no mount. A volume of the
//! library and a mounted one have the same format, but other keys.
//!
//! ```
//! use ramet::{Batch, Options, Span};
//!
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("store.ramet");
//! let store = Options::default().create(&path, 64 << 20)?;
//! let mut batch = Batch::new();
//! batch.put("users/ann", "1");
//! batch.put("users/bob", "2");
//! store.apply(batch)?;
//!
//! // A whole table, copied at once, and changed.
//! let mut batch = Batch::new();
//! batch.clone_prefix("users/", "trial/");
//! batch.put("trial/bob", "3");
//! store.apply(batch)?; // all of it or nothing, also across a crash
//! assert_eq!(store.get(b"users/bob")?.as_deref(), Some(&b"2"[..]));
//!
//! // The cost of a diff follows the changes, not the size of the tables.
//! let diff = store.diff_range(&Span::prefix("users/"), &Span::prefix("trial/"));
//! let found = diff.collect::<ramet::Result<Vec<_>>>()?;
//! assert_eq!((found.len(), &found[0].key[..]), (1, &b"bob"[..]));
//!
//! store.sync()?; // durable: one sequential write, one device sync
//! store.close()?;
//! drop(store);
//! let store = Options::default().open(&path)?;
//! assert_eq!(store.get(b"trial/bob")?.as_deref(), Some(&b"3"[..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Overview
//!
//! - [`Options`] makes and opens a store; [`Tree`] is the open store, cheap to clone, for any
//!   number of threads.
//! - [`Batch`]: put, delete, blind patches of bytes, deletion and clone of ranges; atomic as a
//!   whole.
//! - [`Tree::get`], [`Tree::scan`], and [`Tree::snapshot`] for any number of reads of one moment.
//!   Snapshots never wait for writers, and writers never wait for snapshots.
//! - [`Tree::diff_range`] and [`Snapshot::diff_range`]: the differences between two ranges or two
//!   moments.
//! - [`Tree::usage`]: the space of a range, and the part of it that no other range shares.
//! - [`Tree::sync`], [`Tree::checkpoint`], [`Tree::stats`], [`Tree::verify`], [`Tree::close`].
//!
//! Every change is visible when [`Tree::apply`] returns. It is durable after the next
//! [`Tree::sync`], or within about a second. Dropping the last handle syncs as well, but only
//! [`Tree::close`] and [`Tree::sync`] tell whether that succeeded. After a crash the store is as it
//! was at one moment, no older than the last sync that returned.
//!
//! # In memory, or anywhere else
//!
//! A store lies on a [`Device`]: a [`MemDevice`] for tests, or a [`FileDevice`], which is a file or
//! a block device.
//!
//! ```
//! use std::sync::Arc;
//! use ramet::{Batch, Device, MemDevice, Options};
//!
//! let device: Arc<dyn Device> = Arc::new(MemDevice::new(16 << 20));
//! let store = Options::default().create_on(device)?;
//! let mut batch = Batch::new();
//! batch.put("k", "abcd");
//! batch.patch("k", 1, "XY"); // does not read
//! store.apply(batch)?;
//! let then = store.snapshot();
//! let mut batch = Batch::new();
//! batch.delete_prefix("k");
//! store.apply(batch)?;
//! assert_eq!(then.get(b"k")?.as_deref(), Some(&b"aXYd"[..]));
//! assert_eq!(store.scan(b"", None).count(), 0);
//! # Ok::<(), ramet::Error>(())
//! ```
//!
//! The file system on top, without FUSE: feature `fs`, module `ramet::fs`.
#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::Arc;

use ramet_betree::{FormatOptions, OpenOptions};
use ramet_block::owner::{Contents, own};
use ramet_block::{Access, Budget, Call, ClaimError, DeviceError, Uuid, create_image};

pub use ramet_betree::{
    Batch, Diff, Difference, Error, KEY_BYTES_MAX, PathCounts, Result, Scan, Seq, Snapshot, Span,
    Stats, StructuralPath, Tree, Usage, VALUE_BYTES_MAX, VOLUME_BYTES_MIN,
};
pub use ramet_block::{Codec, Device, FileDevice, MemDevice, ZstdLevel};
/// The file-system layer: directories, files and clones of both, by inode number; see
/// [`fs::Volume`].
#[cfg(feature = "fs")]
pub use ramet_fs as fs;

/// The reason why a store could not be made or opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file or block device is missing, exists already, is in use, or cannot be read.
    #[error(transparent)]
    Device(#[from] ramet_block::OpenError),
    /// Another process or machine writes to the device, or its owner is not known.
    #[error(transparent)]
    Owner(#[from] ClaimError),
    /// The contents of the device are no sound store.
    #[error(transparent)]
    Store(#[from] Error),
}

/// Ignores the message about a wait for an owner: the caller waits for the answer anyway.
fn quietly(_: &str) {}

/// Options for making and opening a store.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Memory that the store may take, in bytes; `None` takes the smaller of a quarter of the
    /// machine's memory and half of the control group's limit.
    pub memory_bytes: Option<u64>,
    /// Compression of data that is written; `None` takes the default for a new store, and the
    /// store's own compression for an old one.
    pub compression: Option<Codec>,
    /// Refuse every change. The device is not written, and other processes may read at the same
    /// time.
    pub read_only: bool,
}

impl Options {
    /// Makes a store of `bytes`, at least [`VOLUME_BYTES_MIN`] and a multiple of 4096, in a new
    /// sparse file, and opens it.
    ///
    /// # Errors
    /// `Device` when the file exists or cannot be made. `Store` when `bytes` is too small, in which
    /// case no file is made, or when the device fails.
    pub fn create(
        &self,
        path: impl AsRef<Path>,
        bytes: u64,
    ) -> std::result::Result<Tree, OpenError> {
        if bytes < VOLUME_BYTES_MIN {
            // The check comes before the file is made.
            return Err(Error::Invalid("a volume takes at least 4 MiB").into());
        }
        let device = create_image(path.as_ref(), bytes)?;
        let owned = own(Arc::new(device), Contents::Anything, &mut quietly)?;
        Ok(self.create_on(Arc::new(owned))?)
    }

    /// Makes a store over the old contents of `device`, and opens it.
    ///
    /// # Errors
    /// `Invalid` when the device is too small, and the errors of the device.
    pub fn create_on(&self, device: Arc<dyn Device>) -> Result<Tree> {
        let random = || {
            let number = Uuid::random();
            number.map_err(|e| Error::Io(DeviceError::new(Call::Take, "a random number", e)))
        };
        let uuid = random()?;
        let format = FormatOptions {
            uuid: uuid.0,
            codec: self.compression,
            node_seed: random()?.low(),
            ..FormatOptions::default()
        };
        Tree::format(&device, &format)?;
        self.open_on(device)
    }

    /// Opens the store in a file or on a block device. After a crash the store has all changes that
    /// were synced. One process may open a store at a time, or any number of readers. If the store
    /// was not closed, its last process may still be alive, as on another machine. This call then
    /// waits ten seconds for a sign of life.
    ///
    /// # Errors
    /// `Device` when the file is missing or in use. `Owner` when the store is in use elsewhere.
    /// `Store` when the contents are no store, or damaged.
    pub fn open(&self, path: impl AsRef<Path>) -> std::result::Result<Tree, OpenError> {
        let access = if self.read_only {
            Access::ReadOnly
        } else {
            Access::ReadWrite
        };
        let device: Arc<dyn Device> = Arc::new(FileDevice::open(path.as_ref(), access)?);
        if self.read_only {
            return Ok(self.open_on(device)?);
        }
        let owned = own(device, Contents::Volume, &mut quietly)?;
        Ok(self.open_on(Arc::new(owned))?)
    }

    /// Opens the store on `device`.
    ///
    /// # Errors
    /// `NotAVolume`, `Corrupt`, and the errors of the device.
    pub fn open_on(&self, device: Arc<dyn Device>) -> Result<Tree> {
        let options = OpenOptions {
            budget: self.memory_bytes.map(Budget::of_volumes),
            read_only: self.read_only,
            codec: self.compression,
            ..OpenOptions::default()
        };
        Tree::open(device, options)
    }
}
