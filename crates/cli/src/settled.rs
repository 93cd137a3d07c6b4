//! Changes of a fork that Ramet itself made, in the repository there (`repository.rs`). They are no
//! changes of the user, as long as the files are as they were left.

use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use ramet_fs::{ToldForkChanges, text_of_path};
use rustix::fs::{AtFlags, CWD, Stat, statat};

/// Number, size, and times of modification and change of a file.
type State = (u64, i64, (i64, u64), (i64, u64));

pub fn state(stat: &Stat) -> State {
    (
        stat.st_ino,
        stat.st_size,
        (stat.st_mtime, stat.st_mtime_nsec as _),
        (stat.st_ctime, stat.st_ctime_nsec as _),
    )
}

/// A file that Ramet wrote, as it was left.
pub struct Written {
    path: PathBuf,
    left: State,
}

impl Written {
    pub fn new(path: PathBuf, stat: &Stat) -> Written {
        let left = state(stat);
        Written { path, left }
    }

    /// Whether nobody changed it since.
    fn is_as_left(&self) -> bool {
        let now = statat(CWD, &self.path, AtFlags::SYMLINK_NOFOLLOW);
        now.is_ok_and(|now| state(&now) == self.left)
    }
}

/// An index that has numbers of the fork.
pub struct Renumbered {
    pub index: Written,
    /// Names of the directory that changed.
    pub names: u64,
}

/// A linked worktree in the fork that belongs to the repository there.
pub struct Led {
    /// Its path from the top of the fork.
    pub tree: PathBuf,
    /// Its entry in the repository.
    pub entry: PathBuf,
    /// The file `.git` of the one and the file `gitdir` of the other, which lead to each other.
    pub files: [Written; 2],
}

/// The changes of one fork.
#[derive(Default)]
pub struct Settled {
    pub indexes: Vec<Renumbered>,
    pub worktrees: Vec<Led>,
}

impl Settled {
    /// The linked worktrees that nobody has led elsewhere.
    pub fn led(&self) -> Vec<&Led> {
        let all = self.worktrees.iter();
        all.filter(|led| led.files.iter().all(Written::is_as_left))
            .collect()
    }

    /// The changes of the user among those of the fork. Changes in `.git` are told all or not at
    /// all.
    pub fn without(&self, mut changes: ToldForkChanges) -> ToldForkChanges {
        let led = self.led();
        let file = |led: &&Led| text_of_path(led.tree.join(".git").as_os_str().as_bytes());
        let files: Vec<String> = led.iter().map(file).collect();
        changes.names.retain(|one| !files.contains(&one.path));
        let count = led.len() as u64;
        changes.count = changes.count.saturating_sub(count);
        let in_git = count + self.indexes.iter().map(|one| one.names).sum::<u64>();
        let is_as_left = self.indexes.iter().all(|one| one.index.is_as_left());
        let is_all = is_as_left && in_git == changes.in_git && in_git == changes.count;
        match is_all {
            true => ToldForkChanges::default(),
            false => changes,
        }
    }
}
