//! A command that runs in a fork, as a rule at the path of the fork's source.
//!
//! The command is a child in the process group of this process, so the keys of the terminal reach
//! both. This process ignores them. It passes on the signals that other processes send to it, and
//! stops with a child that stops, so a shell that waits for it has the terminal again.

use std::ffi::{OsStr, OsString};
use std::io::{ErrorKind, stdin};
use std::path::{Path, PathBuf};
use std::process::Command;

use ramet_sys::{
    Cover, NotStarted, Place, Received, SignalWatch, Step, foreground_group, spawn_covered,
    take_foreground,
};
use rustix::fs::{Stat, fstat};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, getpgrp, getpid, getsid, kill_process,
    test_kill_process_group, waitpid,
};
use rustix::termios::{OptionalActions, QueueSelector, Termios, tcflush, tcgetattr, tcsetattr};
use signal_hook::consts::{
    SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTTOU, SIGUSR1, SIGUSR2, SIGWINCH,
};

use crate::failure::{Failure, Outcome, reason};
use crate::resolve;

/// Exit statuses of programs that run others, as env(1) and timeout(1) have them.
pub mod status {
    pub const TROUBLE: u8 = 125;
    pub const CANNOT_RUN: u8 = 126;
    pub const NOT_FOUND: u8 = 127;
    /// Of a program that a signal ended: this and the signal's number.
    pub const SIGNAL: u8 = 128;
}

/// The variable that tells the command in which fork it runs.
const FORK_VARIABLE: &str = "RAMET_FORK";

/// A directory by its path, which is absolute and without links.
pub struct Dir {
    pub path: PathBuf,
    stat: Stat,
}

impl Dir {
    /// The directory that `path` leads to; a link at its end is followed.
    pub fn at(path: &Path) -> Outcome<Dir> {
        let failed = |e| Failure::system(path, e);
        let dir = resolve::directory(path)?;
        Ok(Dir {
            stat: fstat(&dir).map_err(failed)?,
            path: resolve::path_of(&dir).map_err(failed)?,
        })
    }

    /// Its inode number.
    pub fn ino(&self) -> u64 {
        self.stat.st_ino
    }

    fn place(&self) -> Place {
        Place {
            path: self.path.clone(),
            device: self.stat.st_dev,
            ino: self.stat.st_ino,
        }
    }
}

/// The end of a command.
pub struct Ended {
    /// The exit status for the caller.
    pub status: u8,
    /// A process asked this one to end meanwhile, or its terminal went.
    pub is_told_to_end: bool,
    /// The modes of the terminal before, if this process was in the foreground of one.
    modes: Option<Termios>,
}

impl Ended {
    /// Makes the terminal ready for a question: in its modes from before the command, and without
    /// input that was typed for the command.
    pub fn make_ready_to_ask(&self) {
        // A terminal that is gone gives the end of the input for an answer.
        if let Some(modes) = &self.modes {
            let _ = tcsetattr(stdin(), OptionalActions::Drain, modes);
        }
        let _ = tcflush(stdin(), QueueSelector::IFlush);
    }
}

/// A command and the fork in which it runs.
pub struct Inside<'a> {
    pub fork: &'a Dir,
    /// The directory at whose path the fork stands; none if it stands at its own.
    pub onto: Option<&'a Dir>,
    pub command: &'a [OsString],
}

impl Inside<'_> {
    /// The directory in which the command starts, and whether the caller is in another one.
    fn start(&self) -> (PathBuf, bool) {
        let top = self.onto.unwrap_or(self.fork);
        let Ok(here) = std::env::current_dir() else {
            return (top.path.clone(), true);
        };
        if here.starts_with(&top.path) {
            return (here, false);
        }
        match here.strip_prefix(&self.fork.path) {
            Ok(below) => (top.path.join(below), true),
            Err(_) => (top.path.clone(), true),
        }
    }

    /// Starts the command. It did not begin where that fails.
    pub fn begin(&self) -> Outcome<Running> {
        let watch = SignalWatch::start(&WATCHED).map_err(trouble)?;
        let (program, args) = self.command.split_first().expect("there is a command");
        let (start, is_elsewhere) = self.start();
        let mut command = Command::new(program);
        command
            .args(args)
            .env(FORK_VARIABLE, self.fork.path.as_os_str());
        if is_elsewhere {
            command.env("PWD", &start);
        }
        let cover = self.onto.map(|onto| Cover {
            from: self.fork.place(),
            onto: onto.place(),
        });
        let group = getpgrp().as_raw_nonzero().get();
        let had_terminal = foreground_group(stdin()) == Some(group);
        let modes = had_terminal.then(|| tcgetattr(stdin()).ok()).flatten();
        let child = spawn_covered(command, cover.as_ref(), &start, &watch);
        let child = child.map_err(|e| self.not_started(program, &start, &e))?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        Ok(Running {
            child: pid.expect("a child has a number"),
            watch,
            had_terminal,
            modes,
        })
    }

    /// The reason for which the command did not begin.
    fn not_started(&self, program: &OsStr, start: &Path, refused: &NotStarted) -> Failure {
        let why = reason(&refused.error);
        let onto = self.onto.unwrap_or(self.fork);
        let failure = match refused.step {
            Step::Namespace => {
                let why = match Errno::from_io_error(&refused.error) {
                    Some(Errno::NOSPC) => "user.max_user_namespaces allows no more",
                    Some(Errno::PERM | Errno::ACCESS) => "not permitted",
                    _ => &why,
                };
                Failure::new(format!(
                    "this system lets the caller make no namespace for mounts ({why}): --own-path \
                     runs the command in the fork at its own path"
                ))
            }
            Step::From => Failure::at(&self.fork.path, why),
            Step::Onto => Failure::at(&onto.path, why),
            Step::Mount => Failure::at(&onto.path, format!("cannot mount the fork there ({why})")),
            Step::Directory => Failure::at(start, why),
            Step::Program => {
                let status = match refused.error.kind() {
                    ErrorKind::NotFound => status::NOT_FOUND,
                    _ => status::CANNOT_RUN,
                };
                return Failure::at(Path::new(program), why).with_status(status);
            }
        };
        failure.with_status(status::TROUBLE)
    }
}

fn trouble(e: std::io::Error) -> Failure {
    Failure::at(Path::new("signals"), reason(&e)).with_status(status::TROUBLE)
}

/// A command that runs.
pub struct Running {
    child: Pid,
    watch: SignalWatch,
    /// This process was in the foreground of the terminal.
    had_terminal: bool,
    /// The modes of that terminal then.
    modes: Option<Termios>,
}

impl Running {
    /// Waits for the end of the command.
    pub fn wait(self) -> Outcome<Ended> {
        let ended = wait_for(self.child, &self.watch, self.had_terminal);
        if self.had_terminal && is_terminal_left(self.child) {
            let _ = take_foreground(stdin());
        }
        let (status, is_told_to_end) = ended.map_err(trouble)?;
        Ok(Ended {
            status,
            is_told_to_end,
            modes: self.modes,
        })
    }
}

/// Whether the terminal belongs to the group of a command that has ended, as after a shell that did
/// not give it back. A group that another program is in keeps it: this process may be in the
/// background by now.
fn is_terminal_left(child: Pid) -> bool {
    let Some(group) = foreground_group(stdin()).and_then(Pid::from_raw) else {
        return false;
    };
    group == child || test_kill_process_group(group) == Err(Errno::SRCH)
}

/// Signals that are taken while a command runs.
const WATCHED: [i32; 9] = [
    SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTTOU, SIGUSR1, SIGUSR2, SIGWINCH,
];

/// Waits for the end of the child, and passes signals on until then. Returns the exit status for the
/// caller, and whether this process was told to end.
fn wait_for(child: Pid, watch: &SignalWatch, has_terminal: bool) -> std::io::Result<(u8, bool)> {
    let mut is_told_to_end = false;
    loop {
        let received = watch.next()?;
        if received.signal == SIGCHLD {
            if let Some(found) = state_of(child)? {
                if let Some(status) = status_of(found) {
                    return Ok((status, is_told_to_end));
                }
                if has_terminal && found.stopped() {
                    stop_with(child);
                }
            }
            continue;
        }
        let is_for_child = is_for_child(received, child);
        let is_hangup = received.is_of_kernel && received.signal == SIGHUP;
        let is_end = [SIGHUP, SIGINT, SIGQUIT, SIGTERM].contains(&received.signal);
        is_told_to_end |= is_hangup || is_end && is_for_child;
        if let Some(signal) = Signal::from_named_raw(received.signal).filter(|_| is_for_child) {
            match kill_process(child, signal) {
                // The child has become another user.
                Ok(()) | Err(Errno::PERM | Errno::SRCH) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// Whether a signal is to be passed on. The kernel sends those of the terminal's keys to the child
/// as well, but it tells the leader of a session alone that the terminal is gone.
fn is_for_child(received: Received, child: Pid) -> bool {
    match received.signal {
        SIGTTOU => false,
        SIGHUP if received.is_of_kernel => getsid(None) == Ok(getpid()),
        _ => !received.is_of_kernel && received.sender != child.as_raw_nonzero().get(),
    }
}

/// The state that a child came into, if it is one of interest.
fn state_of(child: Pid) -> std::io::Result<Option<WaitStatus>> {
    let flags = WaitOptions::NOHANG | WaitOptions::UNTRACED;
    Ok(waitpid(Some(child), flags)?.map(|(_, status)| status))
}

/// The exit status for the caller, of a child that has ended.
fn status_of(found: WaitStatus) -> Option<u8> {
    let number = |number: i32| u8::try_from(number).unwrap_or(u8::MAX);
    let of_signal = |signal| status::SIGNAL.saturating_add(number(signal));
    let exited = found.exit_status().map(number);
    exited.or_else(|| found.terminating_signal().map(of_signal))
}

/// Stops this process as the child has stopped, and lets the child go on with it.
fn stop_with(child: Pid) {
    // Neither call fails: the first signal goes to this process, the second one to a child that was
    // not waited for.
    let _ = kill_process(getpid(), Signal::STOP);
    // Another process has let this one go on.
    let _ = kill_process(child, Signal::CONT);
}
