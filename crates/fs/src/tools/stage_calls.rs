//! The control call that stages a change ([`crate::control::STAGE`]): requests and answers, which
//! the caller and the daemon exchange as JSON.

use serde::{Deserialize, Serialize};

/// The name in the staged directory: that of a staged copy, and the one that a tree gets that is
/// removed.
pub const STAGED_NAME: &str = "staged";

/// A change of a name in the directory that the call is made on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum StageRequest {
    /// Clone an object to the name.
    Clone {
        /// Token of the source, the answer to [`SOURCE`](crate::control::SOURCE).
        source: u64,
        /// Name of the copy.
        name: Vec<u8>,
        /// Replace an entry of that name.
        replace: bool,
    },
    /// Clone an object of a snapshot to the name.
    Restore {
        /// Token of the root of the volume, the answer to [`SOURCE`](crate::control::SOURCE).
        root: u64,
        /// Name of the snapshot.
        snapshot: String,
        /// Names of the object from the root of the volume, joined by `/`.
        path: Vec<u8>,
        /// Name of the copy.
        name: Vec<u8>,
        /// Replace an entry of that name.
        replace: bool,
    },
    /// Remove the object of this name with everything below it.
    Remove {
        /// The name.
        name: Vec<u8>,
    },
    /// The staged directory is open: have the kernel drop its name.
    Opened {
        /// Its name.
        dir: String,
    },
}

/// The object that a change replaces or removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replaced {
    /// Its inode number.
    pub ino: u64,
    /// Whether it is a directory.
    pub is_dir: bool,
}

/// The answer to a [`StageRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageReply {
    /// Name of the staged directory. It serves once, and only the user of the call.
    pub dir: String,
    /// The object that the change replaces or removes.
    pub replaced: Option<Replaced>,
}
