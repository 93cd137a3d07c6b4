//! Steps that tests of space share.

use ramet_betree::Tree;

/// Bytes that do not compress.
pub fn value(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..len / 8).flat_map(next).collect()
}

/// Does all work that an idle volume has; returns the number of steps.
pub fn idle(tree: &Tree) -> u32 {
    let mut steps = 0;
    while tree.reclaim_space().unwrap() {
        steps += 1;
        assert!(steps < 10_000, "an idle volume comes to rest");
    }
    tree.checkpoint().unwrap();
    steps
}

pub fn contents(tree: &Tree) -> Vec<(Vec<u8>, Vec<u8>)> {
    let all = tree.scan(b"", None);
    all.map(|pair| pair.map(|(key, value)| (key.to_vec(), value.to_vec())))
        .collect::<Result<_, _>>()
        .unwrap()
}

pub fn assert_sound(tree: &Tree) {
    let complaints = tree.verify(&mut |_| {}).unwrap();
    assert!(complaints.is_empty(), "{complaints:?}");
}
