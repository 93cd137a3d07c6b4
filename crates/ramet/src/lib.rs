//! Ramet as a library: an ordered store of keys and values, in one file or on one block device, whose ranges are
//! *cloned* in constant time.
//!
//! A clone is a copy: writable, independent of its source, as fast to read, and it takes space only for what
//! changes on either side. Keys are byte strings up to [`KEY_BYTES_MAX`], values up to [`VALUE_BYTES_MAX`]. No FUSE and no
//! mount is involved; a volume made here and a mounted one have the same format, but other keys.
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
//! // What changed costs what changed, not the size of the tables.
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
//! # What there is
//!
//! - [`Options`] makes and opens a store; [`Tree`] is the open store, cheap to clone, for any number of threads.
//! - [`Batch`]: put, delete, blind patches of bytes, deletion and clone of ranges; atomic as a whole.
//! - [`Tree::get`], [`Tree::scan`], and [`Tree::snapshot`] for any number of reads of one moment, which never wait for
//!   writers nor they for it.
//! - [`Tree::diff_range`] and [`Snapshot::diff_range`]: what differs between two ranges or two moments.
//! - [`Tree::usage`]: what space a range takes, and what of it nobody else uses.
//! - [`Tree::sync`], [`Tree::checkpoint`], [`Tree::stats`], [`Tree::verify`], [`Tree::close`].
//!
//! Every change is visible when [`Tree::apply`] returns and durable after the next [`Tree::sync`], or within
//! about a second. Dropping the last handle syncs as well, but only [`Tree::close`] and [`Tree::sync`] tell whether that succeeded.
//! After a crash the store is as it was at one moment, no older than the last sync that returned.
//!
//! # In memory, or anywhere else
//!
//! A store lies on a [`Device`]; [`MemDevice`] is one for tests, [`FileDevice`] a file or block device.
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
use ramet_block::{Access, ClaimError, Uuid, create_image};

pub use ramet_betree::{
    Batch, Diff, Difference, Error, KEY_BYTES_MAX, PathCounts, Result, Scan, Seq, Snapshot, Span,
    Stats, Tree, Usage, VALUE_BYTES_MAX, VOLUME_BYTES_MIN,
};
pub use ramet_block::{Codec, Device, FileDevice, MemDevice, ZstdLevel};
/// The file-system layer: directories, files and clones of both, by inode number; see [`fs::Volume`].
#[cfg(feature = "fs")]
pub use ramet_fs as fs;

/// Why a store could not be made or opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file or block device: missing, there already, in use, not to be read.
    #[error(transparent)]
    Device(#[from] ramet_block::OpenError),
    /// Another process or machine writes to it, or its owner cannot be told.
    #[error(transparent)]
    Owner(#[from] ClaimError),
    /// What is on it.
    #[error(transparent)]
    Store(#[from] Error),
}

/// The wait for an owner that may be alive needs no word here: the caller waits for the answer.
fn quietly(_: &str) {}

/// How to make or open a store.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Memory for cached nodes, in bytes; `None` takes a quarter of the machine's.
    pub cache_bytes: Option<u64>,
    /// Compression of what is written; `None` takes the default for a new store, and for an old one what
    /// it was made with.
    pub compression: Option<Codec>,
    /// Refuse every change. Nothing is written, and others may read at the same time.
    pub read_only: bool,
}

impl Options {
    /// Makes a store of `bytes`, at least [`VOLUME_BYTES_MIN`] and a multiple of 4096, in a new sparse file, and opens it.
    ///
    /// # Errors
    /// `Device` when the file exists or cannot be made; `Store` when it is too small, which makes no file, or the device fails.
    pub fn create(
        &self,
        path: impl AsRef<Path>,
        bytes: u64,
    ) -> std::result::Result<Tree, OpenError> {
        if bytes < VOLUME_BYTES_MIN {
            // Before there is a file.
            return Err(Error::Invalid("a volume takes at least 4 MiB").into());
        }
        let device = create_image(path.as_ref(), bytes)?;
        let owned = own(Arc::new(device), Contents::Anything, &mut quietly)?;
        Ok(self.create_on(Arc::new(owned))?)
    }

    /// Makes a store over whatever `device` holds, and opens it.
    ///
    /// # Errors
    /// `Invalid` when the device is too small, and what the device answers.
    pub fn create_on(&self, device: Arc<dyn Device>) -> Result<Tree> {
        let uuid = Uuid::random().map_err(|e| Error::Io {
            what: "a random number",
            source: Arc::new(e),
        })?;
        let format = FormatOptions {
            uuid: uuid.0,
            codec: self.compression,
            ..FormatOptions::default()
        };
        Tree::format(&device, &format)?;
        self.open_on(device)
    }

    /// Opens the store in a file or on a block device, after a crash with everything that was synced. One process at
    /// a time, or any number of readers. When the store was not closed, and the process that had it open is not known to have
    /// ended, as on another machine, this waits ten seconds for a sign of life.
    ///
    /// # Errors
    /// `Device` when it is missing or in use, `Owner` when it is in use elsewhere; `Store` when it is no store, or damaged.
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
    /// `NotAVolume`, `Corrupt`, and what the device answers.
    pub fn open_on(&self, device: Arc<dyn Device>) -> Result<Tree> {
        let options = OpenOptions {
            cache_bytes: self.cache_bytes,
            read_only: self.read_only,
            codec: self.compression,
            ..OpenOptions::default()
        };
        Tree::open(device, options)
    }
}
