//! Volumes grow, mounted or not, and writes that were refused for want of room succeed then.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::Output;

use ramet_e2e::{Bed, ramet_bin, run};

const MIB: u64 = 1 << 20;

fn grow(target: &Path, size: &str) -> Output {
    run(
        ramet_bin(),
        &[
            "grow",
            "--size",
            size,
            target.to_str().expect("temporary paths are UTF-8"),
        ],
    )
}

/// Writes noise to a file until it has `most` MiB or there is no room; returns how many were
/// written.
fn write_mib(path: &Path, most: u64) -> u64 {
    let mut file = File::create(path).expect("a name takes little room");
    let mut state = 1u64;
    for done in 0..most {
        let piece: Vec<u8> = (0..MIB)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005) + 1;
                (state >> 33) as u8
            })
            .collect();
        match file.write_all(&piece) {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::StorageFull => return done,
            Err(e) => panic!("{e}"),
        }
    }
    file.sync_all().expect("what was taken fits");
    most
}

#[test]
fn volumes_grow_mounted_and_not() {
    let bed = Bed::new("64M");
    let mount = bed.mount(&[]);
    let (small, large) = (mount.root().join("small"), mount.root().join("large"));
    assert!(write_mib(&small, 100) < 64);

    let out = grow(mount.root(), "32M");
    assert!(!out.status.success());
    assert!(String::from_utf8_lossy(&out.stderr).contains("volumes do not shrink"));
    // By the name of the image that is mounted, and by a directory.
    for (target, size) in [(bed.volume(), "128M"), (mount.root().to_path_buf(), "256M")] {
        let out = grow(&target, size);
        assert!(out.status.success(), "{out:?}");
    }
    let total = rustix::fs::statvfs(mount.root()).expect("it is mounted");
    assert!(total.f_blocks * total.f_frsize > 200 * MIB);
    assert_eq!(mount.stat()["device_bytes"], 256 * MIB);
    assert_eq!(write_mib(&large, 100), 100);
    mount.umount();
    bed.fsck();

    let out = grow(&bed.volume(), "1G");
    assert!(out.status.success(), "{out:?}");
    bed.fsck();
    let length = fs::metadata(bed.volume()).expect("it is there").len();
    assert_eq!(length, 1024 * MIB);
    let mount = bed.mount(&[]);
    assert_eq!(mount.stat()["device_bytes"], 1024 * MIB);
    let large = fs::metadata(large).expect("it is there").len();
    assert_eq!(large, 100 * MIB);
    mount.umount();
}
