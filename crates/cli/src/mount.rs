//! `ramet mount`: starts the daemon and waits until the mount is usable.
//!
//! The daemon is this program again, in a session of its own. Its standard output is a pipe to this
//! process with one line: `ready` or a failure. So the user sees an error of the daemon on the
//! terminal.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ramet_fuse::{MountOptions, Transport, options_in};
use rustix::mount::UnmountFlags;

use crate::args::Mount;
use crate::beside::Live;
use crate::budget::budget;
use crate::control::Root;
use crate::detach::detach;
use crate::failure::{Failure, Outcome, is_of_dead_mount};
use crate::home::{Home, refuse_before_init};
use crate::size::Size;
use crate::{daemon, inherited, mounts, output};

pub fn run(args: &Mount) -> Outcome<u8> {
    // Both roles refuse here all that can be refused before a daemon runs. Paths are made absolute
    // because the daemon leaves the current directory.
    let (plan, log) = plan(args).inspect_err(|failure| {
        if args.daemon {
            // Something changed since the starter looked.
            daemon::tell_starter(failure);
        }
    })?;
    if let Some(name) = plan.snapshot.as_deref().filter(|_| !args.daemon)
        && let Some(live) = Live::of(&plan.volume)?
    {
        if args.foreground {
            let why = "--foreground goes with a volume that is not mounted: the snapshot is served \
                       by the daemon of";
            return Err(Failure::new(format!("{why} {}", live.dir.display())));
        }
        let given = given_to_daemon(args)?;
        if !given.is_empty() {
            let of = live.dir.display();
            let why = format!("the snapshot is served by the daemon of {of}, as that was started");
            output::complain(format_args!("{}: without effect: {why}", given.join(", ")));
        }
        return live.mount(&plan, name).map(|()| 0);
    }
    if args.foreground {
        return daemon::serve(plan, args.daemon);
    }
    inherited::hand_on_nothing();
    let child = spawn(args, &plan, log.as_deref())?;
    await_ready(child)
        .inspect_err(|_| leave_no_dead_mount(&plan.dir))
        .map(|()| 0)
}

/// The options given that concern the process that serves the mount.
fn given_to_daemon(args: &Mount) -> Outcome<Vec<&'static str>> {
    let options = Options::parse(args, "")?;
    let choices = [
        (options.memory.is_some(), "memory"),
        (options.log.is_some(), "log"),
        (options.mount.threads != 0, "threads"),
        (options.mount.transport == Transport::Ring, "io_uring"),
        (options.mount.recovery, "recovery"),
    ];
    let given = choices.into_iter().filter(|(given, _)| *given);
    Ok(given.map(|(_, name)| name).collect())
}

/// Whether the options can be understood.
pub fn check_options(args: &Mount) -> Outcome {
    Options::parse(args, "").map(drop)
}

/// Whether the mount can be tried: all checks of `run` before it starts a daemon.
pub fn check(args: &Mount) -> Outcome {
    plan(args).map(drop)
}

/// Whether an option concerns the process that serves the mount, and no request.
pub fn is_own(option: &str) -> bool {
    matches!(
        option.split_once('='),
        Some(("memory" | "cache_size" | "log" | "snapshot", _))
    )
}

/// Whether an option chooses a snapshot.
pub fn is_snapshot(option: &str) -> bool {
    option.trim().starts_with("snapshot=")
}

/// The options of `-o`, and those that the command line has too.
struct Options {
    mount: MountOptions,
    memory: Option<Size>,
    log: Option<PathBuf>,
    snapshot: Option<String>,
}

impl Options {
    fn parse(args: &Mount, fsname: &str) -> Outcome<Options> {
        let mut options = Options {
            mount: MountOptions::new(fsname),
            memory: None,
            log: None,
            snapshot: None,
        };
        let all = || args.options.iter().flat_map(|list| options_in(list));
        if all().any(is_snapshot) {
            // Modes of then may open files that were closed since.
            let mount = &mut options.mount;
            (mount.nosuid, mount.nodev, mount.allow_other) = (true, true, false);
        }
        for option in all() {
            match option.trim().split_once('=') {
                Some(("memory" | "cache_size", size)) => {
                    options.memory = Some(size.parse().map_err(Failure::new_from)?);
                }
                Some(("log", file)) => options.log = Some(file.into()),
                Some(("snapshot", name)) => options.snapshot = Some(name.to_owned()),
                _ => options.mount.add(option).map_err(Failure::new_from)?,
            }
        }
        // The command line is the more specific of the two: a line of fstab(5) has `-o` only.
        options.memory = args.memory.or(options.memory);
        options.log = args.log.clone().or(options.log);
        Ok(options)
    }
}

/// The volume, its mount point and options, and the file for the daemon's diagnostics.
fn plan(args: &Mount) -> Outcome<(daemon::Plan, Option<PathBuf>)> {
    let (volume, dir) = match (&args.volume, &args.dir) {
        (Some(volume), Some(dir)) => (volume.clone(), dir.clone()),
        _ => {
            let home = Home::of_user()?;
            refuse_before_init(&home.volume)?;
            (home.volume, home.dir)
        }
    };
    let volume = volume
        .canonicalize()
        .map_err(|e| Failure::system(&volume, e))?;
    let dir = mount_point(&dir)?;
    let options = Options::parse(args, &volume.to_string_lossy())?;
    if options.mount.recovery && !options.mount.read_only {
        return Err(Failure::new(
            "option 'recovery' goes with 'ro': 'ramet fsck --repair' makes a state writable again",
        ));
    }
    if options.snapshot.is_some() && !options.mount.read_only {
        return Err(Failure::new(
            "option 'snapshot' goes with 'ro': nothing changes a snapshot",
        ));
    }
    let plan = daemon::Plan {
        budget: budget(options.memory),
        volume,
        dir,
        options: options.mount,
        snapshot: options.snapshot,
    };
    Ok((plan, options.log))
}

/// The mount point, absolute; a directory on which no Ramet volume is mounted yet.
fn mount_point(dir: &Path) -> Outcome<PathBuf> {
    let found = mounts::at(dir)?;
    match std::fs::metadata(dir) {
        Ok(meta) if !meta.is_dir() => return Err(Failure::at(dir, "not a directory")),
        Ok(_) => {}
        Err(e) => return Err(Failure::system(dir, e)),
    }
    if let Some(mount) = found {
        // The kernel may remember the attributes of a mount point whose daemon is long dead.
        if let Err(e) = Root::open_dir(dir)
            && is_of_dead_mount(e)
        {
            return Err(Failure::system(dir, e));
        }
        let why = format!("{} is already mounted there", mount.volume.display());
        return Err(Failure::at(dir, why));
    }
    dir.canonicalize().map_err(|e| Failure::system(dir, e))
}

fn spawn(args: &Mount, plan: &daemon::Plan, log: Option<&Path>) -> Outcome<Child> {
    let program = Path::new("/proc/self/exe");
    let mut command = Command::new(program);
    command.arg0("ramet");
    command.args(["mount", "--foreground", "--daemon"]);
    for list in &args.options {
        command.arg("-o").arg(list);
    }
    if let Some(size) = args.memory {
        command.arg("--memory").arg(size.bytes().to_string());
    }
    let log = match log {
        Some(path) => {
            let file = OpenOptions::new().create(true).append(true).open(path);
            file.map_err(|e| Failure::system(path, e))?.into()
        }
        None => Stdio::null(),
    };
    command
        .arg("--")
        .arg(&plan.volume)
        .arg(&plan.dir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .map_err(|e| Failure::system(program, e))
}

fn await_ready(mut child: Child) -> Outcome {
    let mut line = String::new();
    if let Some(pipe) = child.stdout.take() {
        // The pipe is not read to its end: a program that the daemon starts may hold it open
        // longer.
        let mut pipe = BufReader::new(pipe);
        loop {
            line.clear();
            let read = pipe.read_line(&mut line);
            read.map_err(|e| Failure::new(format!("cannot read from the daemon: {e}")))?;
            match line.trim_end().strip_prefix(daemon::NOTE) {
                Some(note) => output::complain(note),
                None => break,
            }
        }
    }
    match line.trim_end() {
        daemon::READY => Ok(()),
        "" => Err(Failure::new(format!(
            "the daemon ended before the volume was mounted ({})",
            ended(&mut child)
        ))),
        why => Err(Failure::new(why)),
    }
}

/// Unmounts the dead mount that a killed daemon left at `dir`, where nothing was mounted before.
/// Best effort: the failure of the mount is told in any case.
fn leave_no_dead_mount(dir: &Path) {
    let is_dead = || Root::open_dir(dir).is_err_and(is_of_dead_mount);
    if mounts::at(dir).is_ok_and(|found| found.is_some()) && is_dead() {
        let _ = detach(dir, UnmountFlags::DETACH);
    }
}

fn ended(child: &mut Child) -> String {
    match child.wait() {
        Ok(status) => match status.signal() {
            Some(signal) => format!("signal {signal}"),
            None => format!("status {}", status.code().unwrap_or_default()),
        },
        Err(e) => e.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(list: &str) -> Options {
        let args = Mount {
            options: vec![list.to_owned()],
            foreground: false,
            memory: None,
            log: None,
            daemon: false,
            volume: Some("v".into()),
            dir: Some("d".into()),
        };
        Options::parse(&args, "").unwrap()
    }

    #[test]
    fn names_of_snapshots_survive_the_options() {
        for name in [
            "daily",
            "before the upgrade",
            "a=b",
            "ä\\'",
            "2026-11-25T22:00",
        ] {
            ramet_fs::check_snapshot_name(name).unwrap();
            let options = parsed(&format!("ro,snapshot={name},noatime"));
            assert_eq!(options.snapshot.as_deref(), Some(name));
        }
    }

    #[test]
    fn a_snapshot_opens_nothing_that_was_closed_since() {
        let then = parsed("ro,snapshot=a").mount;
        assert!(then.nosuid && then.nodev && !then.allow_other);
        let open = parsed("ro,snapshot=a,suid,dev,allow_other").mount;
        assert!(!open.nosuid && !open.nodev && open.allow_other);
        assert!(!parsed("ro").mount.nosuid);
    }
}
