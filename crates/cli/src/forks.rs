//! `ramet forks`: the forks of a mount, each below the tree that it was made of.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ramet_fs::{ForkRequest, ToldFork, ToldMeasure, path_of_text};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::args;
use crate::control::{Root, Seen, here, mounted};
use crate::failure::{Failure, Outcome};
use crate::in_use::{self, User, Users};
use crate::output::say;
use crate::past::Located;
use crate::size::Size;

/// The longest wait for measures of others.
const PATIENCE: Duration = Duration::from_secs(60);

/// A fork, as the command tells it.
struct Shown {
    told: ToldFork,
    /// Names from the mount point, joined by `/`.
    path: Vec<u8>,
    origin: Option<Vec<u8>>,
    /// Names that led to the origin from the root of the volume.
    origin_then: Option<Vec<u8>>,
    measure: Option<ToldMeasure>,
    users: Option<Vec<User>>,
}

/// The forks that a command tells.
struct Forks {
    /// The mount point.
    dir: PathBuf,
    all: Vec<Shown>,
}

pub fn run(args: &args::Forks) -> Outcome {
    let (located, only) = match &args.path {
        Some(path) => {
            let located = Located::find(path)?;
            let only = located.inside.clone();
            (located, only)
        }
        None => (Located::find(&here()?)?, Vec::new()),
    };
    let mut forks = Forks::read(&located)?;
    forks.name_origins();
    if !only.is_empty() {
        forks.keep(&only);
    }
    if let Some(path) = args.path.as_deref().filter(|_| forks.all.is_empty()) {
        // A name that leads nowhere may still be that of an origin.
        std::fs::symlink_metadata(path).map_err(|e| Failure::system(path, e))?;
    }
    if !args.quick {
        forks.measure(&located.root)?;
    }
    match args.json {
        true => forks.say_json(),
        false => forks.say_tree(),
    }
}

/// A fork, as its record tells it.
pub struct Known {
    /// The directory that it was made of, where it is today; none if it is gone, or may not be told.
    pub origin: Option<PathBuf>,
    /// The path that this directory had when it was forked, if that may be told.
    pub origin_then: Option<PathBuf>,
    pub note: String,
}

/// The fork at `path` with the inode number `top`.
pub fn known(path: &Path, top: u64) -> Outcome<Known> {
    let located = Located::find(path)?;
    let mut forks = Forks::read(&located)?;
    forks.name_origins();
    let mut all = forks.all.into_iter();
    let Some(shown) = all.find(|shown| shown.told.ino == top) else {
        return Err(Failure::at(path, "is no fork"));
    };
    let full = |names: Vec<u8>| located.dir.join(OsStr::from_bytes(&names));
    Ok(Known {
        origin: shown.origin.map(full),
        origin_then: shown.origin_then.map(full),
        note: shown.told.note,
    })
}

/// The path today of the fork that was at `path` and has the inode number `top`; none if it is gone,
/// or may not be told.
pub fn path_today(path: &Path, top: u64) -> Outcome<Option<PathBuf>> {
    if Seen::known(path, top).is_ok() {
        return Ok(Some(path.to_owned()));
    }
    let forks = Forks::read(&Located::find(path)?)?;
    let found = forks.all.iter().find(|shown| shown.told.ino == top);
    Ok(found.map(|shown| forks.full(&shown.path)))
}

/// The directory that the fork `seen` at `path` was made of, where it is today; none if it is gone,
/// or may not be told.
pub fn origin_today(path: &Path, seen: &Seen) -> Outcome<Option<PathBuf>> {
    Ok(known(path, seen.stat.st_ino)?.origin)
}

/// The reason of a command that needs the directory that a fork was made of, where none is told.
pub const NO_ORIGIN: &str = "the directory that it was made of is gone, or may not be told";

/// The directory that the fork was made of, for a command that needs it.
pub fn origin_of(path: &Path, seen: &Seen) -> Outcome<PathBuf> {
    origin_today(path, seen)?
        .ok_or_else(|| Failure::at(path, format!("{NO_ORIGIN}: name one by --into")))
}

fn path_of(text: &str) -> Outcome<Vec<u8>> {
    path_of_text(text).map_err(Failure::new_from)
}

impl Forks {
    fn read(located: &Located) -> Outcome<Forks> {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let reply = located.root.ask_forks(&ForkRequest::List { after });
            let reply = reply.map_err(|e| mounted(&located.dir, e))?;
            for told in reply.forks {
                all.push(Shown {
                    path: path_of(&told.path)?,
                    origin: told.origin_path.as_deref().map(path_of).transpose()?,
                    origin_then: told.origin_path_then.as_deref().map(path_of).transpose()?,
                    measure: None,
                    users: None,
                    told,
                });
            }
            match reply.next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        // A fork that is reset between two answers is in both.
        all.sort_by_key(|shown| shown.told.id);
        all.dedup_by_key(|shown| shown.told.id);
        Ok(Forks {
            dir: located.dir.clone(),
            all,
        })
    }

    /// The place of the fork that this one was made of, if that is told.
    fn parents(&self) -> Vec<Option<usize>> {
        let by_id: BTreeMap<u64, usize> = self
            .all
            .iter()
            .enumerate()
            .map(|(at, shown)| (shown.told.id, at))
            .collect();
        let parent = |shown: &Shown| {
            let of_fork = shown.told.origin_fork?;
            // An origin is older, so no chain of origins ends in itself.
            by_id
                .get(&of_fork)
                .copied()
                .filter(|_| of_fork < shown.told.id)
        };
        self.all.iter().map(parent).collect()
    }

    /// The origin of a fork of a fork lies where that is today, also after a reset.
    fn name_origins(&mut self) {
        let parents = self.parents();
        for (at, parent) in parents.into_iter().enumerate() {
            if let Some(parent) = parent {
                self.all[at].origin = Some(self.all[parent].path.clone());
            }
        }
    }

    /// Keeps the forks that lie in the directory `only`, and those that were made of it.
    fn keep(&mut self, only: &[u8]) {
        let is_at_or_in = |path: &[u8]| {
            let rest = path.strip_prefix(only);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
        };
        let parents = self.parents();
        let mut kept = BTreeSet::new();
        // Origins come before the forks that were made of them.
        for (at, shown) in self.all.iter().enumerate() {
            let of_kept = parents[at].is_some_and(|parent| kept.contains(&parent));
            let of_only = shown.origin.as_deref() == Some(only);
            if of_kept || of_only || is_at_or_in(&shown.path) {
                kept.insert(at);
            }
        }
        let mut at = 0;
        self.all.retain(|_| {
            at += 1;
            kept.contains(&(at - 1))
        });
    }

    /// Finds space, changes and users of the forks that the caller owns.
    fn measure(&mut self, root: &Root) -> Outcome {
        let own = self.all.iter_mut().filter(|shown| shown.told.is_own);
        let mut own: Vec<_> = own.collect();
        if own.is_empty() {
            return Ok(());
        }
        let failed = |e| mounted(&self.dir, e);
        root.write_back().map_err(failed)?;
        let users = Users::of(root.device().map_err(failed)?);
        let mut fresh = true;
        let until = Instant::now() + PATIENCE;
        for shown in &mut own {
            let path = self.dir.join(OsStr::from_bytes(&shown.path));
            let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
                continue;
            };
            // The fork may be gone by now, or another user may have closed a directory on the way.
            let Ok(above) = Root::open_dir(above) else {
                continue;
            };
            let request = ForkRequest::Measure {
                name: name.as_bytes().to_vec(),
                top: shown.told.ino,
                fresh,
            };
            let mut reply = above.ask_forks(&request);
            // The daemon measures one fork at a time.
            while matches!(reply, Err(Errno::BUSY)) && Instant::now() < until {
                thread::sleep(Duration::from_millis(20));
                reply = above.ask_forks(&request);
            }
            // The others are told all the same.
            let Ok(reply) = reply else { continue };
            shown.measure = reply.measure;
            fresh = false;
            shown.users = in_use::of_fork(&above, (name, shown.told.ino), &users).ok();
        }
        Ok(())
    }

    fn full(&self, path: &[u8]) -> PathBuf {
        self.dir.join(OsStr::from_bytes(path))
    }

    fn say_json(&self) -> Outcome {
        let all: Vec<Value> = self.all.iter().map(|shown| self.as_value(shown)).collect();
        say!("{:#}", Value::from(all))
    }

    fn as_value(&self, shown: &Shown) -> Value {
        let told = &shown.told;
        let text = |path: &[u8]| self.full(path).to_string_lossy().into_owned();
        let mut out = json!({
            "id": told.id,
            "path": text(&shown.path),
            "inode": told.ino,
            "origin": shown.origin.as_deref().map(text),
            "origin_fork": told.origin_fork,
            "origin_then": shown.origin_then.as_deref().map(String::from_utf8_lossy),
            "time": told.time(),
            "time_secs": told.secs,
            "uid": told.uid,
            "note": told.note,
            "base": told.has_base,
        });
        if let Some(measure) = shown.measure {
            out["private_bytes"] = measure.private_bytes.into();
            out["base_bytes"] = measure.base_bytes.into();
            out["freed_bytes"] = measure.freed_bytes.into();
            out["changed"] = measure.changed.into();
        }
        if let Some(users) = &shown.users {
            let users = users.iter().map(
                |user| json!({ "pid": user.pid, "command": user.command, "how": user.how.word() }),
            );
            out["in_use"] = users.collect();
        }
        out
    }

    /// Tells each fork below its origin.
    fn say_tree(&self) -> Outcome {
        let parents = self.parents();
        let mut children: BTreeMap<Option<usize>, Vec<usize>> = BTreeMap::new();
        for (at, parent) in parents.iter().enumerate() {
            children.entry(*parent).or_default().push(at);
        }
        let mut by_origin: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for at in children.remove(&None).unwrap_or_default() {
            by_origin
                .entry(self.origin(&self.all[at]))
                .or_default()
                .push(at);
        }
        for (origin, tops) in by_origin {
            say!("{origin}")?;
            let mut todo: Vec<(usize, usize)> = tops.into_iter().rev().map(|at| (at, 1)).collect();
            while let Some((at, depth)) = todo.pop() {
                say!(
                    "{:indent$}{}",
                    "",
                    self.line(&self.all[at]),
                    indent = 2 * depth
                )?;
                let below = children.remove(&Some(at)).unwrap_or_default();
                todo.extend(below.into_iter().rev().map(|below| (below, depth + 1)));
            }
        }
        Ok(())
    }

    /// The origin of a fork that was made of no fork that is told.
    fn origin(&self, shown: &Shown) -> String {
        match (&shown.origin, &shown.origin_then) {
            (Some(path), _) => plain(&self.full(path)),
            (None, Some(then)) => {
                let then = plain(Path::new(OsStr::from_bytes(then)));
                format!("(gone, or elsewhere) {then}")
            }
            (None, None) => "(not to be seen)".to_owned(),
        }
    }

    fn line(&self, shown: &Shown) -> String {
        let mut parts = vec![plain(&self.full(&shown.path)), age(shown.told.secs)];
        if let Some(measure) = &shown.measure {
            parts.push(format!("private {}", Size::new(measure.private_bytes)));
            if shown.told.has_base {
                parts.push(format!("base {}", Size::new(measure.base_bytes)));
            }
            parts.push(format!("drop frees {}", Size::new(measure.freed_bytes)));
            parts.extend(measure.changed.map(|changed| format!("{changed} changed")));
        }
        if !shown.told.has_base {
            parts.push("no base".to_owned());
        }
        if let Some(first) = shown.users.as_ref().and_then(|users| users.first()) {
            parts.push(format!("in use by {first}"));
        }
        if !shown.told.note.is_empty() {
            parts.push(format!("{:?}", shown.told.note));
        }
        parts.join("  ")
    }
}

/// A path for a terminal: control characters are escaped.
fn plain(path: &Path) -> String {
    let text = path.to_string_lossy();
    match text.chars().any(char::is_control) {
        true => text.escape_debug().to_string(),
        false => text.into_owned(),
    }
}

/// The time since a fork was made.
fn age(secs: i64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |since| since.as_secs().cast_signed());
    age_of(now.saturating_sub(secs).max(0))
}

fn age_of(secs: i64) -> String {
    match secs {
        0..60 => format!("{secs}s"),
        60..3600 => format!("{}min", secs / 60),
        3600..86_400 => format!("{}h", secs / 3600),
        _ => format!("{}d", secs / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_told_in_one_unit() {
        let told = [0, 59, 60, 3599, 3600, 86_399, 86_400, 864_000].map(age_of);
        assert_eq!(
            told,
            ["0s", "59s", "1min", "59min", "1h", "23h", "1d", "10d"]
        );
    }

    fn shown(id: u64, path: &str, origin: &str, of_fork: Option<u64>) -> Shown {
        Shown {
            told: ToldFork {
                id,
                ino: id,
                generation: 1,
                path: path.to_owned(),
                origin_fork: of_fork,
                origin_ino: 1,
                origin_generation: 1,
                origin_path: Some(origin.to_owned()),
                origin_path_then: None,
                secs: 0,
                uid: 0,
                note: String::new(),
                has_base: true,
                is_own: false,
                is_maker: false,
            },
            path: path.into(),
            origin: Some(origin.into()),
            origin_then: None,
            measure: None,
            users: None,
        }
    }

    #[test]
    fn a_directory_keeps_the_forks_in_it_and_those_that_come_of_it() {
        let forks = || Forks {
            dir: PathBuf::from("/m"),
            all: vec![
                shown(1, "a-fork", "a", None),
                shown(2, "b/a-fork-fork", "a-fork", Some(1)),
                shown(3, "b/c", "ab", None),
                shown(4, "bb", "ab", Some(9)),
            ],
        };
        let kept = |only: &str| {
            let mut forks = forks();
            forks.keep(only.as_bytes());
            forks
                .all
                .iter()
                .map(|shown| shown.told.id)
                .collect::<Vec<_>>()
        };
        assert_eq!(kept("a"), [1, 2]);
        assert_eq!(kept("a-fork"), [1, 2]);
        assert_eq!(kept("b"), [2, 3]);
        assert_eq!(kept("ab"), [3, 4]);
        assert_eq!(kept("c"), [0; 0]);
    }
}
