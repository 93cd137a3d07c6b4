//! `ramet scrub`: reads everything on a mounted volume again and repairs from copies where there
//! are any. The exit status is that of fsck(8).
//!
//! The daemon reads a few megabytes for each call. This command paces the calls, so that other
//! programs get the device for half of the time. The command can be ended at any time, and leaves
//! nothing to clean up.

use std::path::Path;
use std::time::Instant;

use rustix::io::Errno;
use serde_json::json;

use crate::args::Scrub;
use crate::control::{Root, mounted, session};
use crate::failure::{Failure, Outcome, status};
use crate::home::refuse_before_init;
use crate::output::say;
use crate::progress::Progress;
use crate::size::Size;
use crate::volume_root::root_of;

pub fn run(args: &Scrub) -> Outcome<u8> {
    let operational = |failure: Failure| failure.with_status(status::FSCK_OPERATIONAL);
    refuse_before_init(&args.dir)?;
    let root = Root::open_dir(&args.dir).map_err(|e| operational(Failure::system(&args.dir, e)))?;
    let root = root_of(&root, &args.dir).map_err(operational)?;
    let mut progress = Progress::new("scrubbing");
    let mut found = Vec::new();
    let session = session().map_err(|e| operational(Failure::system(&args.dir, e)))?;
    let mut starts = true;
    let done_bytes = loop {
        let begun = Instant::now();
        let page = root
            .scrub_page(session, starts)
            .map_err(|e| operational(refusal(&args.dir, e)))?;
        starts = false;
        progress.set(page.done_bytes, page.total_bytes);
        found.extend(page.found);
        if page.is_last {
            break page.done_bytes;
        }
        if !args.fast {
            std::thread::sleep(begun.elapsed());
        }
    };
    drop(progress);
    let lost = found.iter().filter(|damaged| !damaged.is_repaired).count();
    if args.json {
        let report = json!({
            "clean": found.is_empty(),
            "read_bytes": done_bytes,
            "repaired": found.len() - lost,
            "damaged": lost,
            "found": serde_json::to_value(&found).unwrap_or_default(),
        });
        say!("{report:#}")?;
    } else {
        for damaged in &found {
            let outcome = if damaged.is_repaired {
                "repaired"
            } else {
                "lost"
            };
            let location = damaged.location.as_deref().unwrap_or("no file");
            say!(
                "{outcome}: {} at byte {}: {} ({location})",
                damaged.what,
                damaged.addr,
                damaged.detail
            )?;
        }
        let verdict = match (found.len(), lost) {
            (0, _) => "clean".to_string(),
            (n, 0) => format!("{n} repaired"),
            (n, lost) => format!("{} repaired, {lost} damaged", n - lost),
        };
        let read = Size::new(done_bytes);
        say!("{}: {verdict}, {read} read", args.dir.display())?;
    }
    Ok(match (found.is_empty(), lost) {
        (true, _) => 0,
        (false, 0) => status::FSCK_CORRECTED,
        (false, _) => status::FSCK_UNCORRECTED,
    })
}

fn refusal(dir: &Path, e: Errno) -> Failure {
    match e {
        Errno::PERM => Failure::at(
            dir,
            "only root and the user who mounted the volume may scrub it",
        ),
        e => mounted(dir, e),
    }
}
