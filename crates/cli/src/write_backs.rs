//! The daemon has the kernel write back the mapped files of its own mount.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;
use std::{io, thread};

use ramet_fuse::OwnProcesses;

/// How long the daemon waits for a write-back.
const PATIENCE: Duration = Duration::from_secs(10);

/// The write-backs that the daemon asks for, one after the other.
pub struct WriteBacks {
    dir: PathBuf,
    processes: OwnProcesses,
    turns: Mutex<()>,
}

/// The right to write back; no other thread of the daemon has it meanwhile.
pub struct Turn<'a> {
    write_backs: &'a WriteBacks,
    _turn: MutexGuard<'a, ()>,
}

impl WriteBacks {
    /// Of the mount at `dir`; each process that is in it counts among `processes`.
    pub fn of(dir: &Path, processes: OwnProcesses) -> Self {
        Self {
            dir: dir.to_owned(),
            processes,
            turns: Mutex::default(),
        }
    }

    /// Waits until no other thread writes back.
    pub fn take_turn(&self) -> Turn<'_> {
        Turn {
            write_backs: self,
            _turn: self.turns.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }
}

impl Turn<'_> {
    /// Has the kernel write back the mapped files of the mount, by `ramet sync`.
    ///
    /// Another process sends the request. A thread that waits for an answer of its own process cannot
    /// be killed, and keeps `/dev/fuse` open. A daemon that is killed meanwhile would leave a mount
    /// without answers.
    ///
    /// # Errors
    /// `TimedOut` after ten seconds, while the process goes on; the command failed.
    pub fn write_back(&self) -> io::Result<()> {
        let process = self.write_backs.processes.begin();
        let mut sync = Command::new("/proc/self/exe")
            .arg("sync")
            .arg("--")
            .arg(&self.write_backs.dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let (ended, has_ended) = mpsc::channel();
        // The thread outlives a wait that ends early, and reaps the process whenever it ends.
        thread::Builder::new()
            .name("write-back".into())
            .spawn(move || {
                let status = sync.wait();
                drop(process);
                let _ = ended.send(status);
            })?;
        let status = has_ended
            .recv_timeout(PATIENCE)
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        if status.success() {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "'ramet sync' ended with {status}"
        )))
    }
}
