//! The paths that an archive has made.
//!
//! A path may have thousands of directories above it, which are paths as well. So each path is known
//! by its hash alone, and takes the same memory however long it is. No two paths of one hash can be
//! found.

use std::collections::HashMap;

use sha2::{Digest, Sha256};

/// The part of a hash that is kept.
type Known = [u8; 16];

/// A directory above a path is another object.
pub struct NoDirectory;

/// See the module. Directories above a path are made before it.
#[derive(Default)]
pub struct Made(HashMap<Known, bool>);

fn known(hash: Sha256) -> Known {
    let hash: [u8; 32] = hash.finalize().into();
    *hash.first_chunk().expect("a hash is longer")
}

impl Made {
    /// Notes an object.
    pub fn insert(&mut self, path: &[u8], is_directory: bool) {
        let hash = Sha256::new_with_prefix(path);
        self.0.insert(known(hash), is_directory);
    }

    /// Whether the object at a path is a directory; `None` if there is none.
    pub fn is_directory(&self, path: &[u8]) -> Option<bool> {
        let hash = Sha256::new_with_prefix(path);
        self.0.get(&known(hash)).copied()
    }

    /// The length of the path of the first directory above `path` that was not made; `None` if all
    /// were.
    ///
    /// # Errors
    /// One of them is another object.
    pub fn missing_above(&self, path: &[u8]) -> Result<Option<usize>, NoDirectory> {
        let (mut hash, mut start) = (Sha256::new(), 0);
        for end in ends_above(path) {
            hash.update(&path[start..end]);
            start = end;
            match self.0.get(&known(hash.clone())) {
                Some(true) => {}
                Some(false) => return Err(NoDirectory),
                None => return Ok(Some(end)),
            }
        }
        Ok(None)
    }
}

/// The lengths of the paths of the directories above `path`, the shortest first.
pub fn ends_above(path: &[u8]) -> impl Iterator<Item = usize> {
    let bytes = path.iter().enumerate();
    bytes.filter(|(_, byte)| **byte == b'/').map(|(end, _)| end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_above_a_path_are_made_or_missing_or_other_objects() {
        let mut made = Made::default();
        made.insert(b"a", true);
        made.insert(b"a/b", true);
        made.insert(b"a/f", false);
        let missing = |path: &[u8]| made.missing_above(path).ok();
        assert_eq!(missing(b"x"), Some(None));
        assert_eq!(missing(b"a/x"), Some(None));
        assert_eq!(missing(b"a/b/c/d/e"), Some(Some(5)));
        assert_eq!(missing(b"ab/c"), Some(Some(2)));
        assert_eq!(missing(b"a/f/c"), None);
        assert_eq!(made.is_directory(b"a/f"), Some(false));
        assert_eq!(made.is_directory(b"a/b"), Some(true));
        assert_eq!(made.is_directory(b"a/"), None);
    }
}
