//! The place of received trees, and its calls.

use std::io;

use crate::format::record::Kind;
use crate::format::stream::{NewObject, SentAttributes, SentFlags, StreamId};

/// Beginning of the notes of received trees.
const NOTE: &str = "received ";

/// The note of a received tree.
#[must_use]
pub fn note_of_received(id: StreamId) -> String {
    format!("{NOTE}{id}")
}

/// The object that has a name in the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// None.
    Free,
    /// The tree that was received with this identity.
    Received(StreamId),
    /// Another one.
    Taken,
}

impl Presence {
    /// A directory that is a fork with this note.
    #[must_use]
    pub fn of_note(note: &str) -> Self {
        let digits = note.strip_prefix(NOTE).filter(|text| text.len() == 32);
        let id = digits.and_then(|text| u128::from_str_radix(text, 16).ok());
        id.map_or(Self::Taken, |id| Self::Received(StreamId(id.to_be_bytes())))
    }
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
    /// Makes an object that only the caller may use.
    ///
    /// # Errors
    /// Those of the system.
    fn make(&mut self, path: &[u8], object: NewObject<'_>) -> io::Result<()>;
    /// The kind of an object.
    ///
    /// # Errors
    /// Those of the system.
    fn kind(&mut self, path: &[u8]) -> io::Result<Kind>;
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
    /// Whether there is a received tree with this identity that has a base, and that belongs to the
    /// caller.
    ///
    /// # Errors
    /// Those of the system.
    fn has_base(&mut self, id: StreamId) -> io::Result<bool>;
    /// Clones the base of such a tree.
    ///
    /// # Errors
    /// Those of the system.
    fn copy_base(&mut self, path: &[u8], id: StreamId) -> io::Result<()>;
    /// Forks a directory of the stage, to a name that is free.
    ///
    /// # Errors
    /// Those of the system.
    fn fork(&mut self, path: &[u8], from: &[u8], note: &str) -> io::Result<()>;
    /// The object with this name in the destination.
    ///
    /// # Errors
    /// Those of the system.
    fn presence(&mut self, name: &[u8]) -> io::Result<Presence>;
    /// Gives a directory of the stage its name in the destination, or exchanges it for the directory
    /// of this name.
    ///
    /// # Errors
    /// Those of the system.
    fn publish(&mut self, path: &[u8], name: &[u8], exchanges: bool) -> io::Result<()>;
    /// Makes everything durable.
    ///
    /// # Errors
    /// Those of the system.
    fn sync(&mut self) -> io::Result<()>;
}
