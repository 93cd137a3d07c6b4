//! A volume larger than its cache is filled and read with bounded memory.
//!
//! `RAMET_CACHE_MIB` sets the cache; the data is four times that.

use std::io::{Read, Write};

use ramet_e2e::{Bed, number, seeded};
use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};

const MIB: usize = 1 << 20;
const FILE_MIB: u64 = 8;

#[test]
fn memory_stays_bounded_with_four_times_the_cache_in_data() {
    let bed = Bed::new("16G");
    let seed = seeded("cache").next_u64();
    let cache_mib = number("RAMET_CACHE_MIB", 64);
    let cache = format!("{cache_mib}M");
    let files = cache_mib * 4 / FILE_MIB;
    let bound = (cache_mib + 256) << 20;
    // RssAnon leaves out the program's own text, which the kernel may drop at any time.
    let check = |mount: &ramet_e2e::Mount, when: &str| {
        let (high, anon) = (mount.memory("VmHWM"), mount.memory("RssAnon"));
        println!(
            "{when}: peak {} MiB, now {} MiB anonymous",
            high >> 20,
            anon >> 20
        );
        assert!(high <= bound, "{when}: the daemon held {} MiB", high >> 20);
    };
    let mount = bed.mount(&["--cache-size", &cache]);
    for file in 0..files {
        let mut rng = StdRng::seed_from_u64(seed ^ file);
        let path = mount.root().join(format!("file{file}"));
        let mut out = std::fs::File::create(path).expect("the mount is writable");
        let mut bytes = vec![0u8; MIB];
        for _ in 0..FILE_MIB {
            rng.fill_bytes(&mut bytes);
            out.write_all(&bytes).expect("there is room");
        }
    }
    check(&mount, "filled");
    mount.umount();
    let mount = bed.mount(&["--cache-size", &cache]);
    for file in 0..files {
        let mut rng = StdRng::seed_from_u64(seed ^ file);
        let path = mount.root().join(format!("file{file}"));
        let mut input = std::fs::File::open(path).expect("it was written");
        let (mut bytes, mut expected) = (vec![0u8; MIB], vec![0u8; MIB]);
        for number in 0..FILE_MIB {
            rng.fill_bytes(&mut expected);
            input.read_exact(&mut bytes).expect("it was written");
            assert!(bytes == expected, "file{file} differs in MiB {number}");
        }
    }
    check(&mount, "read back");
    mount.umount();
    bed.fsck();
}
