//! The requests of one block device, in the order in which the driver got them (tracepoint
//! `block_rq_issue`).

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::command::run;
use crate::error::{At, Error, Result};

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Discard,
    Flush,
}

/// One request, in bytes of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub kind: Kind,
    pub offset: u64,
    pub bytes: u64,
}

const BUFFER_KIB: &str = "65536";

/// A running trace. Dropping it removes its tracing instance.
pub(crate) struct Tracer {
    instance: PathBuf,
    /// Mounted by us, if nobody had.
    mounted: Option<tempfile::TempDir>,
}

impl Tracer {
    /// Begins to trace the device `number` (`MAJOR:MINOR`).
    pub(crate) fn start(number: &str) -> Result<Tracer> {
        let (root, mounted) = tracefs()?;
        let instance = root.join(format!("instances/ramet-bench-{}", std::process::id()));
        let tracer = Tracer { instance, mounted };
        std::fs::create_dir(&tracer.instance).at(&tracer.instance)?;
        let (major, minor) = number
            .split_once(':')
            .and_then(|(major, minor)| {
                Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
            })
            .ok_or_else(|| Error::Unexpected(format!("device number {number}")))?;
        // As the kernel packs them within itself.
        let dev = major << 20 | minor;
        tracer.set("buffer_size_kb", BUFFER_KIB)?;
        // One clock for all processors: the model of a disk goes by the order.
        tracer.set("trace_clock", "global")?;
        tracer.set(
            "events/block/block_rq_issue/filter",
            &format!("dev == {dev}"),
        )?;
        tracer.set("events/block/block_rq_issue/enable", "1")?;
        Ok(tracer)
    }

    fn set(&self, file: &str, value: &str) -> Result<()> {
        let path = self.instance.join(file);
        std::fs::write(&path, value).at(&path)
    }

    /// Ends the trace and returns the requests seen, in order of time.
    pub(crate) fn finish(self) -> Result<Vec<Request>> {
        self.set("tracing_on", "0")?;
        self.check_nothing_is_lost()?;
        let path = self.instance.join("trace");
        let file = File::open(&path).at(&path)?;
        let mut found = Vec::new();
        for line in BufReader::new(file).lines() {
            let line = line.at(&path)?;
            if let Some(shown) = line.split("block_rq_issue: ").nth(1) {
                let request = parse(shown)
                    .ok_or_else(|| Error::Unexpected(format!("a traced request: {shown}")))?;
                found.extend(request);
            }
        }
        Ok(found)
    }

    /// The kernel writes over the oldest events when a buffer is full, and counts them.
    fn check_nothing_is_lost(&self) -> Result<()> {
        let path = self.instance.join("per_cpu");
        for processor in std::fs::read_dir(&path).at(&path)? {
            let path = processor.at(&path)?.path().join("stats");
            if lost(&std::fs::read_to_string(&path).at(&path)?) {
                return Err(Error::Unexpected(
                    "the kernel's trace buffer was too small for this phase".into(),
                ));
            }
        }
        Ok(())
    }
}

/// Whether events were lost, by the `stats` of one processor.
fn lost(stats: &str) -> bool {
    stats.lines().any(|line| {
        line.split_once(": ").is_some_and(|(what, count)| {
            ["overrun", "commit overrun", "dropped events"].contains(&what) && count.trim() != "0"
        })
    })
}

/// Where tracefs is, after it was mounted if need be.
fn tracefs() -> Result<(PathBuf, Option<tempfile::TempDir>)> {
    for known in ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"] {
        if Path::new(known).join("instances").exists() {
            return Ok((known.into(), None));
        }
    }
    let dir = tempfile::Builder::new()
        .prefix("ramet-bench-")
        .tempdir()
        .at(std::env::temp_dir())?;
    let path = dir.path().to_path_buf();
    run(
        "mount",
        &[
            "-t".as_ref(),
            "tracefs".as_ref(),
            "tracefs".as_ref(),
            path.as_os_str(),
        ],
    )?;
    Ok((path, Some(dir)))
}

/// `MAJOR,MINOR RWBS BYTES (CMD) SECTOR + SECTORS ...`; the outer `None` is a form that we do not
/// know.
fn parse(shown: &str) -> Option<Vec<Request>> {
    let mut words = shown.split_whitespace();
    let (_device, rwbs) = (words.next()?, words.next()?);
    let after = shown.split(") ").nth(1)?;
    let mut words = after.split_whitespace();
    let sector: u64 = words.next()?.parse().ok()?;
    let sectors: u64 = words.nth(1)?.parse().ok()?;
    let request = |kind| Request {
        kind,
        offset: sector.wrapping_mul(512),
        bytes: sectors * 512,
    };
    let flush = Request {
        kind: Kind::Flush,
        offset: 0,
        bytes: 0,
    };
    // A leading F is a flush before the request, one after the letter of the operation is FUA.
    let (before, rest) = match rwbs.strip_prefix('F') {
        Some(rest) => (Some(flush), rest),
        None => (None, rwbs),
    };
    let main = match rest.chars().next() {
        Some('R') => Some(request(Kind::Read)),
        Some('W') => Some(request(Kind::Write)),
        Some('D') => Some(request(Kind::Discard)),
        _ => None,
    };
    let after = main.is_some() && rest[1..].contains('F');
    Some(
        before
            .into_iter()
            .chain(main.filter(|r| r.bytes > 0))
            .chain(after.then_some(flush))
            .collect(),
    )
}

impl Drop for Tracer {
    fn drop(&mut self) {
        let _ = self.set("events/block/block_rq_issue/enable", "0");
        // The kernel lets go of an instance a moment after its last reader.
        let patience = Instant::now() + Duration::from_secs(2);
        while let Err(error) = std::fs::remove_dir(&self.instance) {
            if error.kind() == io::ErrorKind::NotFound {
                break;
            }
            if Instant::now() > patience {
                eprintln!("ramet-bench: {}: {error}", self.instance.display());
                break;
            }
            std::thread::yield_now();
        }
        if let Some(dir) = &mut self.mounted
            && let Err(error) = run("umount", &[dir.path()])
        {
            eprintln!("ramet-bench: {error}");
            // The mounted files must not be removed with the directory.
            dir.disable_cleanup(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_events_are_noticed() {
        let stats = |overrun: u64, dropped: u64| {
            format!(
                "entries: 7\noverrun: {overrun}\ncommit overrun: 0\nbytes: 9\nread events: 1\ndropped events: {dropped}\n"
            )
        };
        assert!(!lost(&stats(0, 0)));
        assert!(lost(&stats(3, 0)) && lost(&stats(0, 1)));
    }

    #[test]
    fn traced_lines_are_understood() {
        let parsed = parse("7,0 WS 4096 () 16 + 8 none,0,0 [worker]").expect("known");
        let write = Request {
            kind: Kind::Write,
            offset: 8192,
            bytes: 4096,
        };
        assert_eq!(parsed, [write]);
        let kinds = |shown: &str| -> Vec<Kind> {
            parse(shown)
                .expect("known")
                .iter()
                .map(|r| r.kind)
                .collect()
        };
        assert_eq!(
            kinds("7,0 FF 0 () 18446744073709551615 + 0 none,0,0 [w]"),
            [Kind::Flush]
        );
        assert_eq!(
            kinds("7,0 FWFS 512 () 8 + 1 none,0,0 [w]"),
            [Kind::Flush, Kind::Write, Kind::Flush]
        );
        assert_eq!(
            kinds("7,0 RA 4096 () 8 + 8 none,0,0 [a (b) c]"),
            [Kind::Read]
        );
        assert_eq!(kinds("7,0 DS 4096 () 8 + 8 none,0,0 [w]"), [Kind::Discard]);
        assert!(parse("7,0 R").is_none());
    }
}
