//! `ramet send`: directory trees as a stream on standard output.
//!
//! The daemon makes the items of the stream (`SEND`), and this process compresses them, section by
//! section. A volume that is not mounted is opened for reading here. A pipe may take long for a
//! section, so another thread tells the daemon that the stream goes on.

use std::ffi::OsStr;
use std::io::{self, StdoutLock, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use ramet_block::{Access, FileDevice};
use ramet_fs::control::SEND;
use ramet_fs::{
    ControlState, OpenOptions, ROOT_INO, Sections, SendPage, SendRequest, Volume,
    encode_stream_head,
};
use rustix::io::Errno;

use crate::args::Send;
use crate::budget::{budget, within};
use crate::control::{Root, mounted, session};
use crate::failure::{Failure, Outcome};
use crate::import::allow_open_files;
use crate::output::{self, not_written};
use crate::past::{Located, shown_in_view};
use crate::progress::Progress;
use crate::request::call;
use crate::size::Size;
use crate::unmounted::{directory_in_volume, find, names_of};
use crate::volume_root::root_of;

/// The daemon drops a stream that nobody asks about for half a minute.
const KEEPING: Duration = Duration::from_secs(8);

/// A place in a snapshot.
type Place = Option<(String, Vec<u8>)>;

/// A tree to be sent.
struct Tree {
    shown: PathBuf,
    name: Vec<u8>,
    at: Place,
    base: Place,
}

/// The daemon, or the open volume, that makes the stream.
enum Source {
    Mount {
        root: Root,
        /// The directories of today, until the first page names their moment: the daemon knows a
        /// directory as long as the kernel does.
        named: Vec<Root>,
        session: u64,
        /// Ends the thread that keeps the stream.
        _kept: Sender<()>,
    },
    Volume {
        volume: Arc<Volume>,
        state: Box<ControlState>,
    },
}

pub fn run(args: &Send) -> Outcome {
    let out = output::bytes("a stream")?;
    let mut source = match directory_in_volume(&args.dirs[0]) {
        Some((image, _)) => open_volume(args, image)?,
        None => open_mount(args)?,
    };
    let written = write(args, &mut source, out);
    if let Source::Volume { volume, .. } = source {
        // Nothing was changed, and the first error is the one to tell.
        drop(volume.close());
    }
    written
}

/// The last name of a path in a volume; that of `top` for the root.
fn name_of(path: &[u8], top: &Path) -> Vec<u8> {
    let last = path.rsplit(|&byte| byte == b'/').next();
    match last.filter(|name| !name.is_empty()) {
        Some(name) => name.to_vec(),
        None => top
            .file_name()
            .map_or(b"root".to_vec(), |name| name.as_bytes().to_vec()),
    }
}

fn open_mount(args: &Send) -> Outcome<Source> {
    let session = session().map_err(|e| Failure::new_from(io::Error::from(e)))?;
    allow_open_files();
    let mut named: Vec<Root> = Vec::new();
    for (number, dir) in args.dirs.iter().enumerate() {
        if directory_in_volume(dir).is_some() {
            let why = "a volume that is not mounted is sent by itself";
            return Err(Failure::at(dir, why));
        }
        let (root, tree) = of_mount(args, dir)?;
        root.stats_json().map_err(|e| mounted(dir, e))?;
        let device = |root: &Root| root.device().map_err(|e| mounted(dir, e));
        if let Some(first) = named.first()
            && device(first)? != device(&root)?
        {
            return Err(Failure::at(dir, "all must be on the same Ramet mount"));
        }
        let top = match tree.at.is_some() || tree.base.is_some() {
            true => token_of_root(&root, dir)?,
            false => 0,
        };
        let request = tree.request(top, (session, number == 0));
        tell(&root, &request).map_err(|e| tree.refusal(e))?;
        named.push(root);
    }
    let root = named.first().map(Root::again);
    let root = root.ok_or_else(|| Failure::new("nothing to send"))?;
    let root = root.map_err(|e| mounted(&args.dirs[0], e))?;
    root.write_back().map_err(|e| mounted(&args.dirs[0], e))?;
    let kept = keep(&root, session).map_err(|e| mounted(&args.dirs[0], e))?;
    Ok(Source::Mount {
        root,
        named,
        session,
        _kept: kept,
    })
}

/// A token of the root of the volume that a directory is of.
fn token_of_root(dir: &Root, shown: &Path) -> Outcome<u64> {
    let named = root_of(dir, shown)?.source(OsStr::new("."));
    named
        .map(|reply| reply.token)
        .map_err(|e| mounted(shown, e))
}

/// A directory of a mount, with the directory that the daemon is called on.
fn of_mount(args: &Send, dir: &Path) -> Outcome<(Root, Tree)> {
    let (located, at) = match shown_in_view(dir)? {
        Some((located, snapshot)) => (located, Some(snapshot)),
        None => (Located::find(dir)?, args.at.clone()),
    };
    let path = located.path;
    let root = match at {
        Some(_) => located.root,
        None => Root::open_tree(dir)?,
    };
    let place = |snapshot: Option<&String>| snapshot.map(|name| (name.clone(), path.clone()));
    let tree = Tree {
        shown: dir.to_owned(),
        name: name_of(&path, &located.dir),
        at: place(at.as_ref()),
        base: place(args.from.as_ref()),
    };
    Ok((root, tree))
}

impl Tree {
    fn request(&self, root: u64, (session, begins): (u64, bool)) -> SendRequest {
        SendRequest::Add {
            root,
            session,
            begins,
            name: self.name.clone(),
            at: self.at.clone(),
            base: self.base.clone(),
        }
    }

    /// The reason of a refusal.
    fn refusal(&self, e: Errno) -> Failure {
        let why = match e {
            Errno::NOENT => "there is no such snapshot, or no directory of this name in it",
            Errno::PERM => "only root and the user who mounted the volume may send its trees",
            Errno::NOTDIR => "is no directory in the snapshot",
            Errno::EXIST => SAME_NAME,
            e => return mounted(&self.shown, e),
        };
        Failure::at(&self.shown, why)
    }
}

fn tell(root: &Root, request: &SendRequest) -> rustix::io::Result<Vec<u8>> {
    call(&root.0, SEND, request)
}

/// Has a thread tell the daemon that the stream goes on, until the answer is dropped.
fn keep(root: &Root, session: u64) -> rustix::io::Result<Sender<()>> {
    let (root, (ends, ended)) = (root.again()?, channel::<()>());
    std::thread::spawn(move || {
        while ended.recv_timeout(KEEPING) == Err(RecvTimeoutError::Timeout) {
            // A stream that is gone is told by the next page.
            if tell(&root, &SendRequest::Keep { session }).is_err() {
                break;
            }
        }
    });
    Ok(ends)
}

fn open_volume(args: &Send, image: &Path) -> Outcome<Source> {
    let device = FileDevice::open(image, Access::ReadOnly).map_err(Failure::device)?;
    let options = OpenOptions {
        read_only: true,
        ..within(budget(args.memory))
    };
    let volume = Volume::open(Arc::new(device), options).map_err(|e| Failure::at(image, e))?;
    let state = Box::<ControlState>::default();
    for (number, dir) in args.dirs.iter().enumerate() {
        let failed = |e: ramet_fs::Error| match (e, args.at.is_some() || args.from.is_some()) {
            (ramet_fs::Error::Exists, _) => Failure::at(dir, SAME_NAME),
            (ramet_fs::Error::NotFound, true) => {
                let why = "there is no such snapshot, or no directory of this name in it";
                Failure::at(dir, why)
            }
            (e, _) => Failure::at(dir, e),
        };
        let inside = match directory_in_volume(dir) {
            Some((of, inside)) if of == image => inside,
            _ => return Err(Failure::at(dir, "all must be in the same volume")),
        };
        let names = names_of(inside);
        let path = names.join(&b'/');
        let place = |snapshot: Option<&String>| snapshot.map(|name| (name.clone(), path.clone()));
        let tree = Tree {
            shown: dir.clone(),
            name: name_of(&path, Path::new(image.file_stem().unwrap_or_default())),
            at: place(args.at.as_ref()),
            base: place(args.from.as_ref()),
        };
        let top = match args.at {
            Some(_) => ROOT_INO,
            None => find(&volume, &names).map_err(failed)?,
        };
        let request = tree.request(0, (0, number == 0));
        let asked = (top, &request);
        let added = volume.controls().send(&state, volume.snapshots(), asked);
        added.map_err(failed)?;
    }
    Ok(Source::Volume { volume, state })
}

impl Source {
    fn next_page(&mut self, shown: &Path) -> Outcome<SendPage> {
        let bytes = match self {
            Source::Mount {
                root,
                named,
                session,
                ..
            } => {
                let next = tell(root, &SendRequest::Next { session: *session });
                let next = next.map_err(|e| match e {
                    Errno::RANGE => Failure::at(shown, TOO_MANY),
                    Errno::MLINK => Failure::at(shown, TOO_MANY_LINKS),
                    e => mounted(shown, e),
                })?;
                named.clear();
                next
            }
            Source::Volume { volume, state } => {
                let asked = (ROOT_INO, &SendRequest::Next { session: 0 });
                let next = volume.controls().send(state, volume.snapshots(), asked);
                next.map_err(|e| match e {
                    ramet_fs::Error::Range => Failure::at(shown, TOO_MANY),
                    ramet_fs::Error::TooManyLinks => Failure::at(shown, TOO_MANY_LINKS),
                    e => Failure::at(shown, e),
                })?
            }
        };
        SendPage::decode(&bytes).map_err(|e| Failure::at(shown, e))
    }
}

const SAME_NAME: &str = "another tree of the stream has the same name: send it by itself";

const TOO_MANY: &str = "has more levels, or differs from the base in more names, than the memory \
     takes (more --memory, or without --from)";

const TOO_MANY_LINKS: &str =
    "has more files with several names than the memory takes (more --memory)";

/// Writes the stream, section by section.
fn write(args: &Send, source: &mut Source, mut out: StdoutLock<'_>) -> Outcome {
    let failed = |e: io::Error| not_written(&e);
    let mut progress = Progress::new("sending");
    let (mut sections, mut items): (Option<Sections>, _) = (None, Vec::new());
    let (mut raw, mut stored) = (0, 0);
    loop {
        let page = source.next_page(&args.dirs[0])?;
        let sections = match &mut sections {
            Some(sections) => sections,
            None => {
                out.write_all(&encode_stream_head(page.stream))
                    .map_err(failed)?;
                sections.insert(Sections::of(page.stream))
            }
        };
        items.extend_from_slice(&page.items);
        if !page.ends_section {
            continue;
        }
        let section = sections.encode(&items, page.ends_stream);
        raw += items.len() as u64;
        items.clear();
        if sections.done().0 > args.behind {
            stored += section.len() as u64;
            out.write_all(&section).map_err(failed)?;
        }
        progress.tell(|| format!("{} as {}", Size::new(raw), Size::new(stored)));
        if page.ends_stream {
            return out.flush().map_err(failed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_have_the_names_of_their_directories() {
        let name = |path: &str, top: &str| name_of(path.as_bytes(), Path::new(top));
        assert_eq!(name("a/b", "/mnt/vol"), b"b");
        assert_eq!(name("", "/mnt/vol"), b"vol");
        assert_eq!(name("", "/"), b"root");
    }
}
