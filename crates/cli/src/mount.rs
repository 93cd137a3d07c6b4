//! `ramet mount`: starts the daemon and waits until the mount is usable.
//!
//! The daemon is this program again, in a session of its own. Its standard output is a pipe to us:
//! one line, `ready` or what went wrong. So an error of the daemon is shown where the user typed.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use ramet_fuse::MountOptions;
use rustix::io::Errno;

use crate::args::Mount;
use crate::control::Root;
use crate::failure::{Failure, Outcome, is_of_dead_mount};
use crate::{daemon, mounts};

pub fn run(args: &Mount) -> Outcome {
    // Everything that can be refused before a daemon runs is refused here, in both roles: paths
    // are made absolute because the daemon leaves the current directory.
    let volume = args
        .volume
        .canonicalize()
        .map_err(|e| Failure::system(&args.volume, e))?;
    let dir = mount_point(&args.dir)?;
    let mut options = MountOptions::new(&volume.to_string_lossy());
    for list in &args.options {
        options.add(list).map_err(Failure::new_from)?;
    }
    let plan = daemon::Plan {
        cache_bytes: args.cache_size.map(|size| size.bytes()),
        volume,
        dir,
        options,
    };
    if args.foreground {
        return daemon::serve(plan, args.daemon);
    }
    let child = spawn(args, &plan)?;
    await_ready(child)
}

/// The mount point, absolute; a directory on which no Ramet volume is mounted yet.
fn mount_point(dir: &Path) -> Outcome<std::path::PathBuf> {
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

fn spawn(args: &Mount, plan: &daemon::Plan) -> Outcome<Child> {
    let program = Path::new("/proc/self/exe");
    let mut command = Command::new(program);
    command.args(["mount", "--foreground", "--daemon"]);
    for list in &args.options {
        command.arg("-o").arg(list);
    }
    if let Some(size) = args.cache_size {
        command.arg("--cache-size").arg(size.bytes().to_string());
    }
    let log = match &args.log {
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
        // Only the first line: a program that the daemon starts may hold the pipe open longer.
        let read = BufReader::new(pipe).read_line(&mut line);
        read.map_err(|e| Failure::new(format!("the daemon cannot be heard: {e}")))?;
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

fn ended(child: &mut Child) -> String {
    match child.wait() {
        Ok(status) => match status.signal() {
            Some(signal) => format!("signal {signal}"),
            None => format!("status {}", status.code().unwrap_or_default()),
        },
        Err(e) => e.to_string(),
    }
}

/// Why the kernel or fusermount3 refused a mount, in words.
pub fn refusal(dir: &Path, error: ramet_fuse::Error) -> Failure {
    let ramet_fuse::Error::Mount { source, .. } = &error else {
        return Failure::at(dir, error);
    };
    match Errno::from_io_error(source) {
        Some(Errno::NOENT | Errno::NODEV) if !Path::new("/dev/fuse").exists() => Failure::at(
            dir,
            "cannot mount: /dev/fuse is missing (load the kernel's 'fuse' module)",
        ),
        Some(Errno::NOENT) => Failure::at(
            dir,
            "cannot mount: fusermount3 is missing (install the package 'fuse3')",
        ),
        Some(Errno::PERM | Errno::ACCESS) => Failure::at(
            dir,
            "cannot mount: permission denied (the mount point must be yours, and fusermount3 \
             from the package 'fuse3' must be installed)",
        ),
        Some(Errno::BUSY) => Failure::at(dir, "cannot mount: the mount point is busy"),
        _ => Failure::at(
            dir,
            format!("cannot mount: {}", crate::failure::reason(source)),
        ),
    }
}
