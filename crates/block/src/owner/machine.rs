//! The machine as the protocol of owners sees it: time, random numbers, and processes that live.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use rustix::time::{ClockId, clock_gettime};

use super::record::{Owner, Process};

/// Knowledge about the process of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It has ended, and so has the opening.
    Dead,
    /// It lives, or nothing says that it does not.
    Unknown,
}

/// The machine that a volume is opened on.
pub trait Machine: Send + Sync {
    /// Time since some moment, also while the machine sleeps (`CLOCK_BOOTTIME`).
    fn now(&self) -> Duration;

    /// Waits.
    fn sleep(&self, time: Duration);

    /// An owner for a new opening by this process, and the start of its life.
    fn open(&self) -> Owner;

    /// Ends the life of an opening by this process.
    fn close(&self, owner: &Owner);

    /// Whether an opening is known to have ended.
    fn life(&self, owner: &Owner) -> Life;
}

/// Openings of this process.
static OPEN: Mutex<BTreeSet<[u8; 16]>> = Mutex::new(BTreeSet::new());

/// The machine that this process runs on.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThisMachine;

impl Machine for ThisMachine {
    fn now(&self) -> Duration {
        let now = clock_gettime(ClockId::Boottime);
        let secs = u64::try_from(now.tv_sec).unwrap_or(0);
        Duration::new(secs, u32::try_from(now.tv_nsec).unwrap_or(0))
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }

    fn open(&self) -> Owner {
        let mut id = [0; 16];
        // A number that is not random is at least one of this process and moment.
        if !matches!(
            rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty()),
            Ok(16)
        ) {
            let now = self.now().as_nanos() ^ u128::from(std::process::id()) << 96;
            id = now.to_le_bytes();
        }
        OPEN.lock().insert(id);
        let name = rustix::system::uname();
        Owner {
            id,
            process: this_process(),
            host: name.nodename().to_string_lossy().into_owned(),
        }
    }

    fn close(&self, owner: &Owner) {
        OPEN.lock().remove(&owner.id);
    }

    fn life(&self, owner: &Owner) -> Life {
        let here = this_process();
        if owner.process == here && here.start_ticks != 0 {
            let is_open = OPEN.lock().contains(&owner.id);
            return if is_open { Life::Unknown } else { Life::Dead };
        }
        judge(&owner.process, &here, state_of)
    }
}

/// Knowledge about a process id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No process has it.
    Gone,
    /// A process has it that started then.
    Started(u64),
    /// A process that has ended has it, of which nobody has taken notice yet.
    Zombie(u64),
    /// It cannot be told.
    Hidden,
}

/// Whether a process is known to have ended, seen from another one.
fn judge(process: &Process, here: &Process, state: impl FnOnce(u32) -> State) -> Life {
    let is_comparable = process.boot_id == here.boot_id
        && process.boot_id != [0; 16]
        && process.pid_namespace == here.pid_namespace
        && process.pid_namespace != 0;
    if !is_comparable {
        return Life::Unknown;
    }
    let is_same =
        |start| process.time_namespace != here.time_namespace || start == process.start_ticks;
    match state(process.pid) {
        State::Gone | State::Zombie(_) => Life::Dead,
        State::Started(start) if !is_same(start) => Life::Dead,
        State::Started(_) | State::Hidden => Life::Unknown,
    }
}

fn this_process() -> Process {
    let namespace = |name: &str| {
        let found = fs::metadata(Path::new("/proc/self/ns").join(name));
        found.map_or(0, |found| found.ino())
    };
    Process {
        boot_id: boot_id().unwrap_or_default(),
        pid_namespace: namespace("pid"),
        time_namespace: namespace("time"),
        pid: std::process::id(),
        start_ticks: stat("self").map_or(0, |(_, start)| start),
    }
}

fn boot_id() -> Option<[u8; 16]> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    u128::from_str_radix(&digits, 16)
        .ok()
        .map(u128::to_be_bytes)
}

/// State and start time of a process by its name in `/proc`.
fn stat(pid: &str) -> Option<(char, u64)> {
    let stat = fs::read_to_string(Path::new("/proc").join(pid).join("stat")).ok()?;
    // The name, in brackets, may hold anything; fields 3 and 22 are behind it.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ');
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

fn state_of(pid: u32) -> State {
    let Some(known) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return State::Hidden;
    };
    if test_kill_process(known) == Err(Errno::SRCH) {
        return State::Gone;
    }
    // A /proc of another namespace shows other processes under the same ids.
    let own = fs::read_link("/proc/self").ok();
    if own != Some(std::process::id().to_string().into()) {
        return State::Hidden;
    }
    let pid = pid.to_string();
    match stat(&pid) {
        Some(('Z' | 'X', start)) if is_last_thread(&pid) => State::Zombie(start),
        Some((_, start)) => State::Started(start),
        None => State::Hidden,
    }
}

/// Whether the first thread of a process is its only one left: those that are still in the kernel
/// may write.
fn is_last_thread(pid: &str) -> bool {
    let tasks = fs::read_dir(Path::new("/proc").join(pid).join("task"));
    tasks.is_ok_and(|tasks| tasks.count() <= 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process() -> Process {
        Process {
            boot_id: [1; 16],
            pid_namespace: 2,
            time_namespace: 3,
            pid: 4,
            start_ticks: 5,
        }
    }

    #[test]
    fn only_a_process_that_is_seen_to_have_ended_is_dead() {
        let here = Process {
            pid: 9,
            start_ticks: 99,
            ..process()
        };
        for (state, life) in [
            (State::Gone, Life::Dead),
            (State::Zombie(5), Life::Dead),
            (State::Started(6), Life::Dead),
            (State::Started(5), Life::Unknown),
            (State::Hidden, Life::Unknown),
        ] {
            assert_eq!(judge(&process(), &here, |_| state), life, "{state:?}");
        }
        let elsewhere: [fn(&mut Process); 4] = [
            |p| p.boot_id = [7; 16],
            |p| p.boot_id = [0; 16],
            |p| p.pid_namespace = 7,
            |p| p.pid_namespace = 0,
        ];
        for change in elsewhere {
            let (mut process, mut here) = (process(), here.clone());
            change(&mut process);
            assert_eq!(judge(&process, &here, |_| State::Gone), Life::Unknown);
            if process.boot_id == [0; 16] || process.pid_namespace == 0 {
                change(&mut here);
                assert_eq!(judge(&process, &here, |_| State::Gone), Life::Unknown);
            }
        }
        // The same start reads differently there.
        let there = Process {
            time_namespace: 7,
            ..here
        };
        assert_eq!(
            judge(&process(), &there, |_| State::Started(6)),
            Life::Unknown
        );
        assert_eq!(judge(&process(), &there, |_| State::Gone), Life::Dead);
    }

    #[test]
    fn an_opening_of_this_process_lives_until_it_is_closed() {
        let owner = ThisMachine.open();
        assert_ne!(owner.process.start_ticks, 0);
        assert_ne!(owner.process.boot_id, [0; 16]);
        assert_eq!(ThisMachine.life(&owner), Life::Unknown);
        ThisMachine.close(&owner);
        assert_eq!(ThisMachine.life(&owner), Life::Dead);
    }

    #[test]
    fn a_process_that_ended_is_dead_also_before_its_parent_knows() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = child.id();
        let process = Process {
            pid,
            start_ticks: stat(&pid.to_string()).unwrap().1,
            ..this_process()
        };
        let life = || judge(&process, &this_process(), state_of);
        assert_eq!(life(), Life::Unknown);
        child.kill().unwrap();
        // Waits for its end, and leaves it a zombie.
        let options =
            rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        let id = rustix::process::WaitId::Pid(Pid::from_child(&child));
        rustix::process::waitid(id, options).unwrap();
        assert_eq!(life(), Life::Dead);
        child.wait().unwrap();
        assert_eq!(life(), Life::Dead);
    }
}
