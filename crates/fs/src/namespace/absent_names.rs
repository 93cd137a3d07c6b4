//! Names that were looked up lately and do not exist.
//!
//! A program that creates a file has the kernel look its name up first. The lookup notes that the
//! directory has no such entry, and the creation that follows need not read it again. A note counts
//! as long as no entry of the directory changed: it has the change counter of the directory. A
//! directory that moves keeps its entries, and one that is removed or replaced with a tree has no
//! path any more, which the creation finds.

use parking_lot::Mutex;

/// Places for notes. A directory has one note at most.
const PLACES: usize = 64;

/// Serial number of a directory in memory, and changes of its entries.
pub(super) type DirectoryState = (u64, u64);

#[derive(Default)]
struct Note {
    directory: Option<DirectoryState>,
    name: Vec<u8>,
}

/// One absent name for each of a few directories.
pub(super) struct AbsentNames {
    places: [Mutex<Note>; PLACES],
}

impl Default for AbsentNames {
    fn default() -> Self {
        Self {
            places: std::array::from_fn(|_| Mutex::default()),
        }
    }
}

impl AbsentNames {
    fn place(&self, (serial, ..): DirectoryState) -> &Mutex<Note> {
        let at = usize::try_from(serial % PLACES as u64).expect("a small number");
        &self.places[at]
    }

    /// Notes that a directory has no entry `name`.
    pub(super) fn note(&self, directory: DirectoryState, name: &[u8]) {
        let mut note = self.place(directory).lock();
        note.directory = Some(directory);
        note.name.clear();
        note.name.extend_from_slice(name);
    }

    /// Whether that is noted of a directory in this state.
    pub(super) fn has(&self, directory: DirectoryState, name: &[u8]) -> bool {
        let note = self.place(directory).lock();
        note.directory == Some(directory) && note.name == name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_counts_for_one_name_in_one_state_of_its_directory() {
        let absent = AbsentNames::default();
        assert!(!absent.has((0, 0), b""));
        absent.note((5, 7), b"a");
        assert!(absent.has((5, 7), b"a"));
        for other in [(6, 7), (5, 8), (5 + PLACES as u64, 7)] {
            assert!(!absent.has(other, b"a"), "{other:?}");
        }
        assert!(!absent.has((5, 7), b"ab") && !absent.has((5, 7), b""));
        absent.note((5, 7), b"b");
        assert!(!absent.has((5, 7), b"a") && absent.has((5, 7), b"b"));
    }
}
