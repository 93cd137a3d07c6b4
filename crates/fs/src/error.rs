//! Errors of the file system. `ramet-fuse` has the one table that turns them into errno values.

use thiserror::Error;

/// An error of the file system.
#[derive(Clone, Debug, Error)]
pub enum Error {
    /// The name, or the object itself, does not exist.
    #[error("no such file or directory")]
    NotFound,
    /// The name exists already.
    #[error("the file exists")]
    Exists,
    /// A directory is needed.
    #[error("not a directory")]
    NotDirectory,
    /// Anything but a directory is needed.
    #[error("is a directory")]
    IsDirectory,
    /// The directory still has entries.
    #[error("the directory is not empty")]
    NotEmpty,
    /// A name has more than 255 bytes, or a symbolic link more than 4095.
    #[error("the name is too long")]
    NameTooLong,
    /// Source and destination are one name of one object.
    #[error("source and destination are the same file")]
    SameFile,
    /// The arguments make no sense together.
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
    /// A hard link would have names in two clone roots. No operation returns it: the two are joined
    /// first, and the operation begins anew.
    #[error("a hard link cannot cross the root of a clone")]
    CrossRoot,
    /// A directory takes more names only with a slot index. No operation returns it: the index is
    /// made, and the operation begins anew (`namespace/slot_index.rs`).
    #[error("a directory lacks its slot index")]
    SlotIndexMissing,
    /// Only the owner or a privileged user may do this.
    #[error("operation not permitted")]
    NotPermitted,
    /// The permission bits refuse this.
    #[error("permission denied")]
    Access,
    /// The object was removed, or replaced by a clone, while the caller held on to it.
    #[error("the object is gone")]
    Stale,
    /// A file would grow beyond 2^62 bytes.
    #[error("the file is too large")]
    TooBig,
    /// There is no such extended attribute.
    #[error("no such attribute")]
    NoAttribute,
    /// The caller's buffer is too small.
    #[error("the result does not fit")]
    Range,
    /// The extended attribute or its name is too long.
    #[error("the attribute is too large")]
    AttributeTooBig,
    /// The file system does not offer this.
    #[error("not supported")]
    Unsupported,
    /// No data, or no hole, from this offset on.
    #[error("no data beyond this offset")]
    NoMoreData,
    /// The object is in use.
    #[error("in use")]
    Busy,
    /// The object has as many names as it can count.
    #[error("too many links")]
    TooManyLinks,
    /// Stored bytes of the file system itself are damaged.
    #[error("corrupt {what}: {detail}")]
    Corrupt {
        /// The structure.
        what: &'static str,
        /// The damage that was found.
        detail: String,
    },
    /// The names and attributes of the files take more memory than their check may take.
    #[error("a check of the files takes more memory than the {bytes} bytes that it may take")]
    CheckTooLarge {
        /// The bound.
        bytes: u64,
    },
    /// The volume was made by another version.
    #[error("the volume has file system version {found}; this program knows version {known}")]
    OtherVersion {
        /// Version on the volume.
        found: u32,
        /// The version that this program reads and writes.
        known: u32,
    },
    /// The change was not made: other work of the tree comes first. No operation returns it: each is
    /// begun anew after that work ([`crate::namespace::resolve::Namespace::until_applied`]).
    #[error("other work comes first: {0:?}")]
    Deferred(ramet_betree::Deferred),
    /// The tree or the device below failed.
    #[error(transparent)]
    Tree(#[from] ramet_betree::Error),
}

/// Result of the file system.
pub type Result<T> = std::result::Result<T, Error>;

/// Turns `Stale` into `NotFound`: a directory that was removed has no entries and takes none.
pub(crate) fn gone_is_not_found(error: Error) -> Error {
    if matches!(error, Error::Stale) {
        Error::NotFound
    } else {
        error
    }
}
