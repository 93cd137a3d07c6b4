//! A program that sees one directory at the path of another one.
//!
//! The program gets a mount namespace of its own, in which the directory `from` is mounted over
//! `onto`. No other process sees that mount, and it goes with the last process in the namespace.
//! Without the right to make a mount namespace the process first makes a user namespace, in which
//! its own user and group are mapped to themselves and no others are mapped. Mounts that come and
//! go outside are seen inside, and none from inside outside.
//!
//! The namespaces are made between fork(2) and execve(2): a process with one thread may make a user
//! namespace, and this process stays outside.

use std::ffi::{CStr, CString};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use rustix::fs::{Mode, OFlags, Stat, fstat, open, stat};
use rustix::io::Errno;
use rustix::mount::{
    MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount_change, move_mount, open_tree,
};
use rustix::process::{getegid, geteuid};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::signals::{SignalMask, SignalWatch};

/// A directory that must be at a path.
#[derive(Clone, Debug)]
pub struct Place {
    /// Absolute path without links.
    pub path: PathBuf,
    /// Number of its device.
    pub device: u64,
    /// Its inode number.
    pub ino: u64,
}

/// A directory at the path of another one.
#[derive(Clone, Debug)]
pub struct Cover {
    /// The directory that the program sees.
    pub from: Place,
    /// The directory that it covers.
    pub onto: Place,
}

/// The step at which a program was not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    /// The namespaces, with the ids in them.
    Namespace = 1,
    /// The directory that the program was to see.
    From,
    /// The directory that it was to cover.
    Onto,
    /// The mount of the one over the other.
    Mount,
    /// The working directory.
    Directory,
    /// The program itself.
    Program,
}

/// The step that failed, and its error.
#[derive(Debug)]
pub struct NotStarted {
    /// The step.
    pub step: Step,
    /// The error of a system call.
    pub error: io::Error,
}

/// Device and inode number.
type Object = (u64, u64);

/// The work of the child before it becomes the program, prepared so that it allocates nothing.
struct Prepared {
    /// Paths of both, and the objects that must be there.
    cover: Option<[(CString, Object); 2]>,
    start: CString,
    uid_map: String,
    gid_map: String,
    before: SignalMask,
    failed: OwnedFd,
}

type Done = Result<(), (Step, Errno)>;

fn is_at(found: &Stat, object: Object) -> bool {
    (found.st_dev, found.st_ino) == object
}

fn write_to(path: &CStr, text: &str) -> rustix::io::Result<()> {
    let file = open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, text.as_bytes()).map(drop)
}

impl Prepared {
    fn run(&self) -> Done {
        if let Some([(from, seen), (onto, covered)]) = &self.cover {
            let failed = |step| move |e| (step, e);
            self.make_namespaces().map_err(failed(Step::Namespace))?;
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let opened = |path: &CStr, object| {
                let dir = open(path, flags, Mode::empty())?;
                match is_at(&fstat(&dir)?, object) {
                    true => Ok(dir),
                    false => Err(Errno::STALE),
                }
            };
            let dir = opened(from, *seen).map_err(failed(Step::From))?;
            let below = opened(onto, *covered).map_err(failed(Step::Onto))?;
            let mount = || {
                let flags = OpenTreeFlags::OPEN_TREE_CLONE
                    | OpenTreeFlags::OPEN_TREE_CLOEXEC
                    | OpenTreeFlags::AT_EMPTY_PATH;
                let tree = open_tree(dir.as_fd(), c"", flags)?;
                let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH
                    | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
                move_mount(tree.as_fd(), c"", below.as_fd(), c"", flags)?;
                match is_at(&stat(onto.as_c_str())?, *seen) {
                    true => Ok(()),
                    false => Err(Errno::STALE),
                }
            };
            mount().map_err(failed(Step::Mount))?;
        }
        let started = rustix::process::chdir(self.start.as_c_str());
        started.map_err(|e| (Step::Directory, e))
    }

    fn make_namespaces(&self) -> rustix::io::Result<()> {
        // SAFETY: the table of descriptors stays shared with no other thread: this process has one.
        match unsafe { unshare_unsafe(UnshareFlags::NEWNS) } {
            Err(Errno::PERM) => {
                let both = UnshareFlags::NEWUSER | UnshareFlags::NEWNS;
                // SAFETY: as above.
                unsafe { unshare_unsafe(both) }?;
                // The kernel asks for this before a process may map its group by itself.
                write_to(c"/proc/self/setgroups", "deny")?;
                write_to(c"/proc/self/gid_map", &self.gid_map)?;
                write_to(c"/proc/self/uid_map", &self.uid_map)?;
            }
            made => made?,
        }
        let slaves = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
        mount_change(c"/", slaves)
    }
}

fn c_string(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

fn named(place: &Place) -> io::Result<(CString, Object)> {
    Ok((c_string(&place.path)?, (place.device, place.ino)))
}

/// Starts a program in the directory `start`, which is resolved behind the mount of `cover`. The
/// signals that `watch` holds back are as they were before in the program.
///
/// # Errors
/// The step that failed. The program did not begin then.
pub fn spawn_covered(
    mut command: Command,
    cover: Option<&Cover>,
    start: &Path,
    watch: &SignalWatch,
) -> Result<Child, NotStarted> {
    let at = |step| move |error| NotStarted { step, error };
    let (mut failed_at, failed) = io::pipe().map_err(at(Step::Program))?;
    let cover = cover.map(|cover| Ok([named(&cover.from)?, named(&cover.onto)?]));
    let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
    let prepared = Prepared {
        cover: cover.transpose().map_err(at(Step::From))?,
        start: c_string(start).map_err(at(Step::Directory))?,
        uid_map: format!("{uid} {uid} 1"),
        gid_map: format!("{gid} {gid} 1"),
        before: watch.mask_before(),
        failed: failed.into(),
    };
    let prepare = move || {
        if let Err((step, error)) = prepared.run() {
            // Without the byte the step is told as that of the program.
            let _ = rustix::io::write(&prepared.failed, &[step as u8]);
            return Err(error.into());
        }
        prepared.before.restore()
    };
    // SAFETY: the closure makes system calls on values that were prepared here. It takes no lock
    // and allocates nothing, so it may run in the child of a process with threads.
    unsafe { command.pre_exec(prepare) };
    let spawned = command.spawn();
    // The closure has the writing end of the pipe.
    drop(command);
    spawned.map_err(|error| {
        let mut byte = [0];
        let told = failed_at.read(&mut byte).unwrap_or(0);
        let steps = [
            Step::Namespace,
            Step::From,
            Step::Onto,
            Step::Mount,
            Step::Directory,
        ];
        let of_byte = steps.into_iter().find(|step| *step as u8 == byte[0]);
        let step = of_byte.filter(|_| told == 1).unwrap_or(Step::Program);
        NotStarted { step, error }
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn place(path: &Path) -> Place {
        let found = std::fs::metadata(path).unwrap();
        Place {
            path: path.to_owned(),
            device: found.dev(),
            ino: found.ino(),
        }
    }

    /// Two folders with a file of their own each, and the cover of the second one by the first.
    fn cover() -> (tempfile::TempDir, Cover) {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        for name in ["from", "onto"] {
            std::fs::create_dir(top.join(name)).unwrap();
            std::fs::write(top.join(name).join("file"), name).unwrap();
        }
        let cover = Cover {
            from: place(&top.join("from")),
            onto: place(&top.join("onto")),
        };
        (dir, cover)
    }

    fn run(cover: &Cover, start: &Path, script: &str) -> Result<bool, NotStarted> {
        let watch = SignalWatch::start(&[libc::SIGUSR1]).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let child = spawn_covered(command, Some(cover), start, &watch);
        child.map(|mut child| child.wait().unwrap().success())
    }

    #[test]
    fn a_program_alone_sees_the_directory_at_the_other_path() {
        let (_dir, cover) = cover();
        let onto = cover.onto.path.clone();
        let script = format!(
            "[ $(cat file) = from ] && [ $(pwd -P) = {0} ] && [ $(cat {0}/file) = from ] && \
             ! grep -q 'SigBlk:.*[1-9a-f]' /proc/self/status",
            onto.display()
        );
        assert!(run(&cover, &onto, &script).unwrap());
        let outside = std::fs::read_to_string(onto.join("file")).unwrap();
        assert_eq!(outside, "onto");
    }

    #[test]
    fn another_object_at_a_path_is_refused() {
        let steps = |change: &dyn Fn(&mut Cover), start: &str| {
            let (_dir, mut cover) = cover();
            change(&mut cover);
            let start = cover.onto.path.join(start);
            run(&cover, &start, "true").unwrap_err().step
        };
        assert_eq!(steps(&|cover| cover.from.ino += 1, "."), Step::From);
        assert_eq!(steps(&|cover| cover.onto.device += 1, "."), Step::Onto);
        assert_eq!(steps(&|_| (), "none"), Step::Directory);
    }
}
