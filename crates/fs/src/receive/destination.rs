//! The place of received trees, and its calls.

use std::io;

use crate::format::record::Kind;
use crate::format::stream::{NewObject, SentAttributes, SentFlags, StreamId};
use crate::receive::staged::STAGE;

/// Beginning of the notes of received trees.
const NOTE: &str = "received ";

/// The note of a received tree.
#[must_use]
pub fn note_of_received(id: StreamId) -> String {
    format!("{NOTE}{id}")
}

/// The identity that a note tells.
fn id_of_note(note: &str) -> Option<StreamId> {
    let digits = note.strip_prefix(NOTE).filter(|text| text.len() == 32)?;
    let id = u128::from_str_radix(digits, 16).ok()?;
    Some(StreamId(id.to_be_bytes()))
}

/// Whether a tree is one that a receiver has made in its stage, by the path that it was forked from.
fn is_of_stage(path: &[u8]) -> bool {
    let mut names = path.rsplit(|&byte| byte == b'/');
    let is_root = |name: &[u8]| !name.is_empty() && name.iter().all(u8::is_ascii_digit);
    names.next().is_some_and(is_root)
        && names.next() == Some(b"now")
        && names
            .next()
            .is_some_and(|name| name.starts_with(STAGE.as_bytes()))
}

/// A tree that was received: a fork whose base is the tree as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedTree {
    /// Its identity.
    pub id: StreamId,
    /// Number of the fork. No other fork of the volume ever has it.
    pub fork: u64,
    /// Inode number of its top, and the generation of that.
    pub top: (u64, u64),
}

impl ReceivedTree {
    /// The fork with these numbers, its note, and the path that it was forked from. The caller has
    /// made it: a user may give any note to a fork of its own.
    #[must_use]
    pub fn of((fork, top): (u64, (u64, u64)), note: &str, origin: &[u8]) -> Option<Self> {
        let id = id_of_note(note).filter(|_| is_of_stage(origin))?;
        Some(Self { id, fork, top })
    }
}

/// An object of the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its inode number.
    pub number: u64,
    /// Its kind.
    pub kind: Kind,
}

/// A directory in which trees are received. Paths lead from the stage, names joined by `/`; all names
/// are checked. Objects are those of the caller, by the rules of `cp -a`.
pub trait Destination {
    /// Opens the stage of this name, which belongs to the caller alone. `false` without one, unless
    /// it `makes` it.
    ///
    /// # Errors
    /// Those of the system, also for another object of this name.
    fn open_stage(&mut self, name: &str, makes: bool) -> io::Result<bool>;
    /// Removes the stage.
    ///
    /// # Errors
    /// Those of the system.
    fn drop_stage(&mut self) -> io::Result<()>;
    /// The names in the stage.
    ///
    /// # Errors
    /// Those of the system.
    fn staged_names(&mut self) -> io::Result<Vec<Vec<u8>>>;
    /// The names in the destination that begin with this, of all stages.
    ///
    /// # Errors
    /// Those of the system.
    fn stages(&mut self, prefix: &str) -> io::Result<Vec<String>>;
    /// Makes an object that only the caller may use.
    ///
    /// # Errors
    /// Those of the system.
    fn make(&mut self, path: &[u8], object: NewObject<'_>) -> io::Result<()>;
    /// Number and kind of an object.
    ///
    /// # Errors
    /// Those of the system.
    fn status(&mut self, path: &[u8]) -> io::Result<Found>;
    /// Gives an object another name.
    ///
    /// # Errors
    /// Those of the system.
    fn link(&mut self, path: &[u8], first: &[u8]) -> io::Result<()>;
    /// Clones an object, to a name that is free.
    ///
    /// # Errors
    /// Those of the system.
    fn copy(&mut self, path: &[u8], from: &[u8]) -> io::Result<()>;
    /// Removes an object with everything below it.
    ///
    /// # Errors
    /// Those of the system.
    fn remove(&mut self, path: &[u8]) -> io::Result<()>;
    /// Writes to a file.
    ///
    /// # Errors
    /// Those of the system.
    fn write(&mut self, path: &[u8], offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Reads a file of at most `max` bytes.
    ///
    /// # Errors
    /// Those of the system.
    fn read(&mut self, path: &[u8], max: u64) -> io::Result<Vec<u8>>;
    /// Makes a hole in a file.
    ///
    /// # Errors
    /// Those of the system.
    fn punch(&mut self, path: &[u8], offset: u64, len: u64) -> io::Result<()>;
    /// Sets the size of a file.
    ///
    /// # Errors
    /// Those of the system.
    fn resize(&mut self, path: &[u8], bytes: u64) -> io::Result<()>;
    /// Sets mode, owner and times.
    ///
    /// # Errors
    /// Those of the system.
    fn set_attributes(&mut self, path: &[u8], attributes: &SentAttributes) -> io::Result<()>;
    /// Sets the flags of a file or directory.
    ///
    /// # Errors
    /// Those of the system.
    fn set_flags(&mut self, path: &[u8], flags: SentFlags) -> io::Result<()>;
    /// Sets an extended attribute; `false` if the caller may not.
    ///
    /// # Errors
    /// Those of the system.
    fn set_xattr(&mut self, path: &[u8], name: &[u8], value: &[u8]) -> io::Result<bool>;
    /// Removes an extended attribute, if it is there.
    ///
    /// # Errors
    /// Those of the system.
    fn remove_xattr(&mut self, path: &[u8], name: &[u8]) -> io::Result<()>;
    /// The trees that the caller received in this volume, and whose bases are kept.
    ///
    /// # Errors
    /// Those of the system.
    fn received(&mut self) -> io::Result<Vec<ReceivedTree>>;
    /// Clones the base of such a tree.
    ///
    /// # Errors
    /// Those of the system; `NotFound` for a tree that is gone.
    fn copy_base(&mut self, path: &[u8], of: &ReceivedTree) -> io::Result<()>;
    /// Forks a directory of the stage, to a name that is free.
    ///
    /// # Errors
    /// Those of the system.
    fn fork(&mut self, path: &[u8], from: &[u8], note: &str) -> io::Result<()>;
    /// The object with this name in the destination.
    ///
    /// # Errors
    /// Those of the system.
    fn look(&mut self, name: &[u8]) -> io::Result<Option<Found>>;
    /// Gives a directory of the stage its name in the destination, or exchanges it for the directory
    /// of this name.
    ///
    /// # Errors
    /// Those of the system.
    fn publish(&mut self, path: &[u8], name: &[u8], exchanges: bool) -> io::Result<()>;
    /// Ends [`Destination::publish`] of a process that was killed behind the name: the directory
    /// `name` gets the mode of the directory `path` of the stage.
    ///
    /// # Errors
    /// Those of the system.
    fn settle(&mut self, path: &[u8], name: &[u8]) -> io::Result<()>;
    /// Makes everything durable.
    ///
    /// # Errors
    /// Those of the system.
    fn sync(&mut self) -> io::Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_and_origins_tell_received_trees() {
        let id = StreamId(*b"0123456789abcdef");
        let note = note_of_received(id);
        assert_eq!(note, "received 30313233343536373839616263646566");
        let of = |note: &str, origin: &[u8]| {
            let tree = ReceivedTree::of((1, (2, 3)), note, origin);
            tree.map(|tree| tree.id)
        };
        assert_eq!(of(&note, b".ramet-receive-07/now/0"), Some(id));
        assert_eq!(of(&note, b"home/.ramet-receive-07/now/12"), Some(id));
        assert_eq!(of("received by mail", b".ramet-receive-07/now/0"), None);
        for origin in [
            "home",
            "",
            "now/0",
            ".ramet-receive-07/now/",
            ".ramet-receive-07/0",
        ] {
            assert_eq!(of(&note, origin.as_bytes()), None, "{origin}");
        }
    }
}
