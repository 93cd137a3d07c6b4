//! Steps of `./demo` that need more than a shell: `ramet-e2e VERB ARGUMENTS`.
//!
//! ```text
//! edit SEED COUNT DIR...           the same random edits in every DIR
//! compare DIR DIR                  everything a user can see, but times; fails when it differs
//! clone SRC DIR NAME               clones SRC to DIR/NAME by the ioctl; prints its microseconds
//! crash SEED MILLISECONDS VOLUME MOUNT
//!                                  writers, kill -9 in their midst, fsck, mount, check; ends mounted
//! recovery VOLUME MOUNT            recovery time against journal size; ends unmounted
//! fsyncs COUNT append|overwrite FILE
//!                                  COUNT times 4 KiB of noise and an fsync; overwrites at random in 64 MiB
//! ```
#![forbid(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use ramet_e2e::tree::Times;
use ramet_e2e::{control, crash, edit, kill_and_wait, ramet_bin, run_ok, tree};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::process::Pid;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match step(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("ramet-e2e: {why}");
            ExitCode::FAILURE
        }
    }
}

fn step(words: &[&str]) -> Result<(), String> {
    match words {
        ["edit", seed, count, dirs @ ..] => {
            let mut rng = StdRng::seed_from_u64(number(seed)?);
            let roots: Vec<&Path> = dirs.iter().map(Path::new).collect();
            edit::mirror(&roots, number(count)? as usize, &mut rng)
        }
        ["compare", left, right] => {
            let found = tree::differences(Path::new(left), Path::new(right), Times::Ignore);
            if found.is_empty() {
                return Ok(());
            }
            Err(format!("{left} and {right} differ:\n{}", found.join("\n")))
        }
        ["clone", src, into, name] => {
            let time = control::clone_timed(Path::new(src), Path::new(into), name)
                .map_err(|e| format!("{src}: {e}"))?;
            println!("{}", time.as_micros());
            Ok(())
        }
        ["crash", seed, millis, volume, dir] => crash_once(
            &mut StdRng::seed_from_u64(number(seed)?),
            Duration::from_millis(number(millis)?),
            Path::new(volume),
            Path::new(dir),
        ),
        ["recovery", volume, dir] => recovery(Path::new(volume), Path::new(dir)),
        ["fsyncs", count, how @ ("append" | "overwrite"), file] => {
            fsyncs(number(count)?, *how == "append", Path::new(file))
                .map_err(|e| format!("{file}: {e}"))
        }
        _ => Err("usage: see the head of crates/e2e/src/main.rs".to_string()),
    }
}

fn crash_once(rng: &mut StdRng, load: Duration, volume: &Path, dir: &Path) -> Result<(), String> {
    let stat = run_ok(ramet_bin(), &[Path::new("stat"), Path::new("--json"), dir]);
    let stat: serde_json::Value = serde_json::from_str(&stat).map_err(|e| e.to_string())?;
    let pid = stat["pid"]
        .as_i64()
        .and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?))
        .ok_or("ramet stat tells no pid")?;
    let folders: Vec<PathBuf> = (0..4).map(|k| dir.join(format!("writer{k}"))).collect();
    let recover = || {
        run_ok(ramet_bin(), &[Path::new("umount"), dir]);
        run_ok(
            ramet_bin(),
            &[Path::new("fsck"), Path::new("--files"), volume],
        );
        run_ok(ramet_bin(), &[Path::new("mount"), volume, dir]);
    };
    let report = crash::round(&folders, load, rng, || kill_and_wait(pid), recover)?;
    println!(
        "{} changes issued, {} acknowledged durable, {} found",
        report.issued, report.durable, report.found
    );
    Ok(())
}

/// Files of 4 KiB and of 100 bytes by turns until the journal has a size, a kill, and the time of
/// the next mount.
fn recovery(volume: &Path, dir: &Path) -> Result<(), String> {
    let ramet = |words: &[&std::ffi::OsStr]| run_ok(ramet_bin(), words);
    let stat = || -> Result<serde_json::Value, String> {
        let text = ramet(&["stat".as_ref(), "--json".as_ref(), dir.as_ref()]);
        serde_json::from_str(&text).map_err(|e| e.to_string())
    };
    println!("{:>12} {:>9} {:>9}", "journal MiB", "files", "mount ms");
    let mut written = 0u64;
    for mib in [0, 1, 4, 16, 64] {
        ramet(&["mount".as_ref(), volume.as_ref(), dir.as_ref()]);
        let mut files = 0u64;
        let mut journal = stat()?["journal_bytes"].as_u64().unwrap_or_default();
        while journal < mib << 20 {
            for _ in 0..128 {
                let bytes = vec![files as u8; if files.is_multiple_of(2) { 4096 } else { 100 }];
                let path = dir.join(format!("{:03}", written / 1000));
                std::fs::create_dir_all(&path).map_err(|e| e.to_string())?;
                std::fs::write(path.join(written.to_string()), bytes).map_err(|e| e.to_string())?;
                (files, written) = (files + 1, written + 1);
            }
            File::open(dir)
                .and_then(|root| root.sync_all())
                .map_err(|e| e.to_string())?;
            let now = stat()?["journal_bytes"].as_u64().unwrap_or_default();
            if now < journal {
                return Err(format!("a checkpoint came before {mib} MiB"));
            }
            journal = now;
        }
        let pid = stat()?["pid"]
            .as_i64()
            .and_then(|pid| i32::try_from(pid).ok());
        kill_and_wait(pid.and_then(Pid::from_raw).ok_or("no pid")?);
        ramet(&["umount".as_ref(), dir.as_ref()]);
        let begun = std::time::Instant::now();
        ramet(&["mount".as_ref(), volume.as_ref(), dir.as_ref()]);
        let took = begun.elapsed().as_millis();
        println!("{:>12.1} {files:>9} {took:>9}", journal as f64 / 1048576.0);
        ramet(&["umount".as_ref(), dir.as_ref()]);
    }
    Ok(())
}

fn fsyncs(count: u64, append: bool, path: &Path) -> std::io::Result<()> {
    const BLOCK_BYTES: u64 = 4096;
    const FILE_BLOCKS: u64 = 16 << 10;
    let mut rng = StdRng::seed_from_u64(1);
    let mut options = File::options();
    let file = options
        .create(true)
        .write(true)
        .append(append)
        .truncate(false)
        .open(path)?;
    let mut noise = [0; BLOCK_BYTES as usize];
    for _ in 0..count {
        rng.fill(&mut noise[..]);
        let at = rng.random_range(0..FILE_BLOCKS) * BLOCK_BYTES;
        // A file opened to append ignores the place.
        file.write_all_at(&noise, at)?;
        file.sync_all()?;
    }
    Ok(())
}

fn number(text: &str) -> Result<u64, String> {
    text.parse()
        .map_err(|_| format!("'{text}' is not a number"))
}
