//! Killing the daemon under load loses nothing that was acknowledged.
//!
//! `RAMET_ROUNDS` rounds (default 3) of `RAMET_LOAD_MS` each.

use std::fs::File;
use std::io::Write;
use std::time::Duration;

use ramet_e2e::{
    Bed, children_of, connections_of, crash, kill_and_wait, number, run, seeded, until,
};
use rand::Rng;
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn acknowledged_changes_survive_a_killed_daemon() {
    let bed = Bed::new("8G");
    let mut rng = seeded("kill");
    let folders: Vec<_> = (0..4)
        .map(|k| bed.mount_point().join(format!("writer{k}")))
        .collect();
    let load_ms = number("RAMET_LOAD_MS", 1500);
    let rounds = number("RAMET_ROUNDS", 3);
    let mut mount = Some(bed.mount(&[]));
    let mut total = crash::Report::default();
    for round in 1..=rounds {
        let load = Duration::from_millis(rng.random_range(load_ms / 3..=load_ms));
        let old = mount.take().expect("mounted by the round before");
        let pid = old.pid();
        let report = crash::round(
            &folders,
            load,
            &mut rng,
            || kill_and_wait(pid),
            || {
                old.detach_dead();
                bed.fsck();
                mount = Some(bed.mount(&[]));
            },
        );
        match report {
            Ok(r) => {
                println!(
                    "round {round}: {} changes issued, {} acknowledged durable, {} found",
                    r.issued, r.durable, r.found
                );
                total.issued += r.issued;
                total.durable += r.durable;
                total.found += r.found;
            }
            Err(why) => panic!("round {round}: {why}"),
        }
    }
    println!(
        "{rounds} rounds: {} changes issued, {} acknowledged durable, 0 of them lost, {} found",
        total.issued, total.durable, total.found
    );
    mount.take().expect("mounted by the last round").umount();
    bed.fsck();
}

/// Leaves of 1 MiB are written before the journal names them. The space of this much takes its room
/// of the host in several steps.
#[test]
fn large_files_survive_a_killed_daemon() {
    for size in ["1G", "20G"] {
        let bed = Bed::new(size);
        let mount = bed.mount(&[]);
        let mut rng = seeded("large");
        let mut written = Vec::new();
        for number in 0..6 {
            let mut contents = vec![0; 16 << 20];
            rng.fill(&mut contents[..]);
            let path = mount.root().join(format!("f{number}"));
            let mut file = File::create(path).expect("writable");
            file.write_all(&contents).expect("there is room");
            file.sync_all().expect("there is room");
            written.push(contents);
        }
        mount.kill_daemon();
        mount.detach_dead();
        let mount = bed.mount(&[]);
        for (number, contents) in written.iter().enumerate() {
            let found = std::fs::read(mount.root().join(format!("f{number}")));
            assert!(found.expect("it was synced") == *contents, "file {number}");
        }
        mount.umount();
        bed.fsck();
    }
}

/// Whether a process has a handler of a signal.
fn catches(process: Pid, signal: Signal) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.as_raw_pid()));
    let status = status.expect("it runs");
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = u64::from_str_radix(caught.expect("the kernel tells it").trim(), 16);
    caught.expect("it is a number") >> (signal.as_raw() - 1) & 1 == 1
}

#[test]
fn requests_to_a_killed_daemon_fail_while_its_connection_is_held() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let held = connections_of(mount.pid());
    assert_ne!(held.len(), 0);
    // The end of a service is a signal to each process of it, and then another one for the daemon.
    let watcher = children_of(mount.pid())[0];
    until("the watcher has a handler", || {
        catches(watcher, Signal::TERM)
    });
    kill_process(watcher, Signal::TERM).unwrap();
    mount.kill_daemon();
    let path = mount.root().join("any");
    let path = path.to_str().unwrap();
    let out = run("timeout", &["--signal=KILL", "20", "stat", path]);
    // `stat` tells an error by 1.
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    drop(held);
    mount.detach_dead();
    bed.fsck();
}
