//! Large files through the mount are written to the device once, and overwriting them reads next to
//! nothing.
//!
//! `RAMET_BULK_MIB` sets the size of the file.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use ramet_e2e::{Bed, Mount, number, seeded};
use rand::Rng;

const MIB: usize = 1 << 20;

/// Bytes that the daemon has written: to the volume, and its short answers to the kernel.
fn written_bytes(mount: &Mount) -> u64 {
    let path = format!("/proc/{}/io", mount.pid().as_raw_pid());
    let text = std::fs::read_to_string(path).expect("the daemon runs");
    let line = text.lines().find_map(|line| line.strip_prefix("wchar: "));
    line.and_then(|line| line.parse().ok())
        .expect("the kernel counts")
}

fn node_reads(mount: &Mount) -> u64 {
    let reads = mount.stat()["node_reads"].as_u64();
    reads.expect("the daemon counts")
}

fn write_and_sync(path: &Path, mib: u64, seed: &str) {
    let mut rng = seeded(seed);
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path);
    let mut file = file.expect("the mount is writable");
    let mut bytes = vec![0u8; MIB];
    for _ in 0..mib {
        rng.fill(&mut bytes[..]);
        file.write_all(&bytes).expect("there is room");
    }
    file.sync_all().expect("the device takes it");
}

#[test]
fn a_large_file_is_written_once_and_overwritten_unread() {
    let mib = number("RAMET_BULK_MIB", 256);
    let bed = Bed::new(&format!("{}M", 3 * mib + 256));
    let mount = bed.mount(&[]);
    let path = mount.root().join("file");
    let permille = |bytes: u64| bytes * 1000 / (mib * MIB as u64);

    let before = written_bytes(&mount);
    write_and_sync(&path, mib, "first");
    let synced = written_bytes(&mount) - before;
    mount.allocated_settled();
    let settled = written_bytes(&mount) - before;
    println!("write and fsync {synced}, with checkpoints {settled}");
    assert!(permille(settled) <= 1050, "{settled} bytes for {mib} MiB");

    let (before, reads) = (written_bytes(&mount), node_reads(&mount));
    write_and_sync(&path, mib, "second");
    let allocated = mount.allocated_settled();
    let reads = node_reads(&mount) - reads;
    let settled = written_bytes(&mount) - before;
    println!("overwrite {settled}, {reads} reads, allocated {allocated}");
    assert!(permille(settled) <= 1050, "{settled} bytes for {mib} MiB");
    // A read of a node takes 16 KiB; some are of the inode's record.
    assert!(permille(reads * 16384) <= 10, "{reads} reads");
    assert!(permille(allocated) <= 1060, "what was overwritten is free");
    mount.umount();
    bed.fsck();
}
