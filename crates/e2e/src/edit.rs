//! Random edits that can be mirrored: the same calls with the same arguments on several copies of
//! a tree, each of which must answer alike.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rand::Rng;
use rand::rngs::StdRng;
use rustix::fs::{FallocateFlags, XattrFlags};

use crate::tree::pick;

/// One change to a tree; paths are relative to its root.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Edit {
    Write {
        path: PathBuf,
        offset: u64,
        bytes: Vec<u8>,
    },
    Append {
        path: PathBuf,
        bytes: Vec<u8>,
    },
    Truncate {
        path: PathBuf,
        len: u64,
    },
    Punch {
        path: PathBuf,
        offset: u64,
        len: u64,
    },
    Create {
        path: PathBuf,
        bytes: Vec<u8>,
    },
    Mkdir {
        path: PathBuf,
    },
    Symlink {
        path: PathBuf,
        target: PathBuf,
    },
    Link {
        from: PathBuf,
        to: PathBuf,
    },
    Rename {
        from: PathBuf,
        to: PathBuf,
    },
    Unlink {
        path: PathBuf,
    },
    RemoveTree {
        path: PathBuf,
    },
    Chmod {
        path: PathBuf,
        mode: u32,
    },
    Xattr {
        path: PathBuf,
        value: Vec<u8>,
    },
}

/// Draws edits for one tree, remembering which names exist.
pub struct Editor {
    files: Vec<PathBuf>,
    dirs: Vec<PathBuf>,
    made: u64,
}

impl Editor {
    /// Reads the names below `root`.
    pub fn new(root: &Path) -> io::Result<Editor> {
        let mut editor = Editor {
            files: Vec::new(),
            dirs: vec![PathBuf::new()],
            made: 0,
        };
        let mut next = 0;
        while let Some(dir) = editor.dirs.get(next).cloned() {
            next += 1;
            let mut entries = fs::read_dir(root.join(&dir))?.collect::<io::Result<Vec<_>>>()?;
            // Sorted: the same seed draws the same edits on every file system.
            entries.sort_by_key(fs::DirEntry::file_name);
            for entry in entries {
                let rel = dir.join(entry.file_name());
                let kind = entry.file_type()?;
                if kind.is_dir() {
                    editor.dirs.push(rel);
                } else if kind.is_file() {
                    editor.files.push(rel);
                }
            }
        }
        Ok(editor)
    }

    /// Draws one edit. Names may be stale after renames and removals: the calls then fail, alike
    /// on every copy.
    pub fn draw(&mut self, rng: &mut StdRng) -> Edit {
        if self.files.is_empty() {
            return self.create(random_bytes(rng, 20_000), rng);
        }
        let at = rng.random_range(0..self.files.len());
        let path = self.files[at].clone();
        match rng.random_range(0..100) {
            drawn @ 0..53 => Self::draw_data(drawn, path, rng),
            53..65 => self.create(random_bytes(rng, 20_000), rng),
            drawn @ 65..90 => self.draw_name(drawn, at, path, rng),
            90..95 => Edit::Chmod {
                path,
                mode: 0o600 | rng.random_range(0..0o1000),
            },
            _ => Edit::Xattr {
                path,
                value: random_bytes(rng, 300),
            },
        }
    }

    /// An edit of the data of the file `path`, by the number below 53 that was drawn for it.
    fn draw_data(drawn: u32, path: PathBuf, rng: &mut StdRng) -> Edit {
        match drawn {
            0..35 => {
                let max = *pick(&[16, 16, 300, 9000], rng);
                Edit::Write {
                    path,
                    offset: rng.random_range(0..50_000),
                    bytes: random_bytes(rng, max),
                }
            }
            35..45 => Edit::Append {
                path,
                bytes: random_bytes(rng, 5000),
            },
            45..50 => Edit::Truncate {
                path,
                len: rng.random_range(0..60_000),
            },
            _ => Edit::Punch {
                path,
                offset: rng.random_range(0..40_000),
                len: rng.random_range(1..40_000),
            },
        }
    }

    /// An edit of names, by the number from 65 to 89 that was drawn for it; `path` is file number
    /// `at`.
    fn draw_name(&mut self, drawn: u32, at: usize, path: PathBuf, rng: &mut StdRng) -> Edit {
        match drawn {
            65..69 => {
                let path = self.fresh("dir", rng);
                self.dirs.push(path.clone());
                Edit::Mkdir { path }
            }
            69..72 => Edit::Symlink {
                path: self.fresh("link", rng),
                target: path,
            },
            72..75 => {
                let to = self.fresh("hard", rng);
                self.files.push(to.clone());
                Edit::Link { from: path, to }
            }
            75..81 => {
                let to = if rng.random_bool(0.3) {
                    pick(&self.files, rng).clone()
                } else {
                    self.fresh("moved", rng)
                };
                self.files.swap_remove(at);
                self.files.push(to.clone());
                Edit::Rename { from: path, to }
            }
            81..83 if self.dirs.len() > 3 => {
                let from = self.dirs.swap_remove(rng.random_range(1..self.dirs.len()));
                let to = self.fresh("moved-dir", rng);
                self.dirs.push(to.clone());
                Edit::Rename { from, to }
            }
            83 if self.dirs.len() > 20 => {
                // Late directories are the deep, small ones; no edit should take half the tree.
                let at = rng.random_range(self.dirs.len() / 2..self.dirs.len());
                Edit::RemoveTree {
                    path: self.dirs.swap_remove(at),
                }
            }
            84..90 => {
                self.files.swap_remove(at);
                Edit::Unlink { path }
            }
            _ => Edit::Xattr {
                path,
                value: random_bytes(rng, 300),
            },
        }
    }

    fn create(&mut self, bytes: Vec<u8>, rng: &mut StdRng) -> Edit {
        let path = self.fresh("new", rng);
        self.files.push(path.clone());
        Edit::Create { path, bytes }
    }

    fn fresh(&mut self, stem: &str, rng: &mut StdRng) -> PathBuf {
        self.made += 1;
        pick(&self.dirs, rng).join(format!("{stem}-{}", self.made))
    }
}

fn random_bytes(rng: &mut StdRng, max: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; rng.random_range(1..=max)];
    rng.fill(&mut bytes[..]);
    bytes
}

impl Edit {
    /// Makes the change below `root`. An error leaves the tree as it was, but for
    /// [`Edit::RemoveTree`].
    pub fn apply(&self, root: &Path) -> io::Result<()> {
        let open = |path: &Path| OpenOptions::new().write(true).open(root.join(path));
        match self {
            Edit::Write {
                path,
                offset,
                bytes,
            } => open(path)?.write_all_at(bytes, *offset),
            Edit::Append { path, bytes } => OpenOptions::new()
                .append(true)
                .open(root.join(path))?
                .write_all(bytes),
            Edit::Truncate { path, len } => open(path)?.set_len(*len),
            Edit::Punch { path, offset, len } => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                Ok(rustix::fs::fallocate(open(path)?, flags, *offset, *len)?)
            }
            Edit::Create { path, bytes } => File::create_new(root.join(path))?.write_all(bytes),
            Edit::Mkdir { path } => fs::create_dir(root.join(path)),
            Edit::Symlink { path, target } => symlink(target, root.join(path)),
            Edit::Link { from, to } => fs::hard_link(root.join(from), root.join(to)),
            Edit::Rename { from, to } => fs::rename(root.join(from), root.join(to)),
            Edit::Unlink { path } => fs::remove_file(root.join(path)),
            Edit::RemoveTree { path } => fs::remove_dir_all(root.join(path)),
            Edit::Chmod { path, mode } => {
                fs::set_permissions(root.join(path), PermissionsExt::from_mode(*mode))
            }
            Edit::Xattr { path, value } => {
                let path = root.join(path);
                Ok(rustix::fs::setxattr(
                    path,
                    "user.edit",
                    value,
                    XattrFlags::empty(),
                )?)
            }
        }
    }
}

/// Makes `count` edits on every root alike, drawn from the names below the first.
///
/// # Errors
/// The first edit that the copies answer differently, in words.
pub fn mirror(roots: &[&Path], count: usize, rng: &mut StdRng) -> Result<(), String> {
    let first = roots.first().ok_or("no tree to edit")?;
    let mut editor = Editor::new(first).map_err(|e| format!("{}: {e}", first.display()))?;
    for number in 0..count {
        let edit = editor.draw(rng);
        let answers: Vec<_> = roots
            .iter()
            .map(|root| edit.apply(root).map_err(|e| e.raw_os_error()))
            .collect();
        if answers.iter().any(|a| *a != answers[0]) {
            return Err(format!("edit {number} {edit:?} answered {answers:?}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{Times, assert_same, synthesize};
    use rand::SeedableRng;

    #[test]
    fn mirrored_edits_keep_copies_alike() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        let mut rng = StdRng::seed_from_u64(2);
        synthesize(&a, 300, &mut rng).unwrap();
        crate::run_ok("cp", &["-a", a.to_str().unwrap(), b.to_str().unwrap()]);
        mirror(&[&a, &b], 2000, &mut rng).unwrap();
        assert_same(&a, &b, Times::Ignore);
    }
}
