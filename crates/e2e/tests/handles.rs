//! Handles of files and places in directories hold in another mount.
//!
//! `handles.py` makes the calls. `RAMET_FILES` is the number of files and of directories
//! (`./soak handles`).

use std::path::Path;

use ramet_e2e::{Bed, number, run_ok};

/// Options of the two ways on which requests come.
const TRANSPORTS: [&str; 2] = ["no_io_uring", "io_uring"];
/// Pieces in which a listing is read, at most.
const PIECES_MAX: usize = 60;

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("not root: no file is opened by its handle");
    }
    is_root
}

/// Runs a phase of the script in a mount of its own, and answers its output.
fn run_phase(bed: &Bed, transport: &str, phase: &str, seed: usize) -> String {
    let mount = bed.mount(&["-o", transport]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/handles.py");
    let (root, state) = (mount.root().join(transport), bed.path().join("state"));
    std::fs::create_dir_all(&root).expect("root may");
    let files = number("RAMET_FILES", 1000).to_string();
    let seed = seed.to_string();
    // Compiled modules would lie beside the scripts.
    let args = [
        "-B".as_ref(),
        script.as_os_str(),
        phase.as_ref(),
        root.as_os_str(),
        state.as_os_str(),
        files.as_ref(),
        seed.as_ref(),
    ];
    let said = run_ok("python3", &args);
    mount.umount();
    said
}

#[test]
fn handles_lead_to_their_files_in_another_mount_and_to_no_heir_of_a_number() {
    if !is_root() {
        return;
    }
    let bed = Bed::new("2G");
    for transport in TRANSPORTS {
        run_phase(&bed, transport, "make-handles", 1);
        let said = run_phase(&bed, transport, "find-handles", 1);
        println!("{transport}: {}", said.trim());
        run_phase(&bed, transport, "find-handles-again", 1);
    }
    bed.fsck();
}

#[test]
fn listings_go_on_in_other_mounts_although_names_come_and_go() {
    if !is_root() {
        return;
    }
    let bed = Bed::new("2G");
    for transport in TRANSPORTS {
        run_phase(&bed, transport, "make-streams", 1);
        let pieces = 1..=PIECES_MAX;
        let mut left = pieces.map(|piece| run_phase(&bed, transport, "read-streams", piece));
        let ended = left.by_ref().position(|left| left.trim() == "0");
        println!("{transport}: {ended:?} pieces");
        assert!(ended.is_some(), "listings end");
    }
    bed.fsck();
}
