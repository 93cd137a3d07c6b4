use std::path::Path;
use std::process::Command;

use super::*;

/// Random numbers, from a seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() >> 11).expect("64 bits") % end
    }
}

/// An entry for an index that is made by hand.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Made {
    path: Vec<u8>,
    number: u32,
    more_flags: bool,
}

fn entry(version: u32, hash: Hash, (made, before): (&Made, &[u8])) -> Vec<u8> {
    let mut out = Vec::new();
    for field in 0..10u32 {
        let value = if field == 5 { made.number } else { field * 7 };
        out.extend(value.to_be_bytes());
    }
    out.extend(vec![0xab; hash.len()]);
    let len = made.path.len().min(0xfff) as u16;
    let flags = if made.more_flags { len | 0x4000 } else { len };
    out.extend(flags.to_be_bytes());
    if made.more_flags {
        out.extend([0x20, 0]);
    }
    if version == 4 {
        let common = before
            .iter()
            .zip(&made.path)
            .take_while(|(a, b)| a == b)
            .count();
        put_varint(&mut out, before.len() - common);
        out.extend(&made.path[common..]);
        out.push(0);
        return out;
    }
    out.extend(&made.path);
    out.resize((out.len() + 8) / 8 * 8, 0);
    out
}

fn index(
    version: u32,
    hash: Hash,
    entries: &[Made],
    extensions: &[(&[u8; 4], Vec<u8>)],
) -> Vec<u8> {
    let mut out = b"DIRC".to_vec();
    out.extend(version.to_be_bytes());
    out.extend((entries.len() as u32).to_be_bytes());
    let mut before: &[u8] = b"";
    for made in entries {
        out.extend(entry(version, hash, (made, before)));
        before = &made.path;
    }
    for (name, contents) in extensions {
        out.extend(*name);
        out.extend((contents.len() as u32).to_be_bytes());
        out.extend(contents);
    }
    let sum = hash.of(&[&out]);
    out.extend(sum);
    out
}

fn entries(index: &Index) -> Vec<(Vec<u8>, u32)> {
    let mut found = Vec::new();
    let all = index.each_entry(|path, place| {
        found.push((path.to_vec(), index.number(place)));
        Ok::<_, Refusal>(())
    });
    all.expect("nothing fails");
    found
}

fn made(path: &str, number: u32) -> Made {
    Made {
        path: path.as_bytes().to_vec(),
        number,
        more_flags: false,
    }
}

fn random_entries(random: &mut Random, version: u32) -> Vec<Made> {
    let mut all: Vec<Made> = (0..random.below(60))
        .map(|_| {
            let part = |random: &mut Random| {
                let len = if random.below(40) == 0 {
                    1000
                } else {
                    1 + random.below(12)
                };
                (0..len)
                    .map(|_| b'a' + random.below(3) as u8)
                    .collect::<Vec<_>>()
            };
            let parts: Vec<_> = (0..1 + random.below(4)).map(|_| part(random)).collect();
            Made {
                path: parts.join(&b'/'),
                number: random.next() as u32,
                more_flags: version > 2 && random.below(5) == 0,
            }
        })
        .collect();
    all.sort_by(|a, b| a.path.cmp(&b.path));
    all
}

#[test]
fn random_indexes_come_back_to_the_byte_and_change_in_their_numbers_alone() {
    let mut random = Random(20261126);
    for _ in 0..2000 {
        let version = 2 + random.below(3) as u32;
        let hash = [Hash::Sha1, Hash::Sha256][random.below(2)];
        let mut all = random_entries(&mut random, version);
        let extensions = [
            (b"TREE", vec![1; random.below(90)]),
            (b"REUC", vec![2; random.below(9)]),
            (b"sdir", Vec::new()),
            (b"ZZZZ", vec![3; random.below(9)]),
        ];
        let mut bytes = index(version, hash, &all, &extensions[..random.below(5)]);
        let is_unchecked = random.below(8) == 0 && !all.is_empty();
        if is_unchecked {
            let sum = bytes.len() - hash.len();
            bytes[sum..].fill(0);
        }
        let mut parsed = Index::parse(bytes.clone()).expect("it is right");
        assert_eq!((parsed.hash, parsed.is_unchecked), (hash, is_unchecked));
        assert_eq!(parsed.with(&Change::default()), bytes);
        let mut places = Vec::new();
        let listed = parsed.each_entry(|_, place| {
            places.push(place);
            Ok::<_, Refusal>(())
        });
        listed.expect("nothing fails");
        for (made, place) in all.iter_mut().zip(places) {
            if random.below(2) == 0 {
                made.number = random.next() as u32;
                parsed.set_number(place, made.number);
            }
        }
        let mut changed = index(version, hash, &all, &[]);
        changed.truncate(changed.len() - hash.len());
        let new = parsed.with(&Change::default());
        assert_eq!(new[..changed.len()], changed);
        assert_eq!(new.len(), bytes.len());
        let expected: Vec<_> = all.into_iter().map(|one| (one.path, one.number)).collect();
        assert_eq!(entries(&Index::parse(new).expect("it is right")), expected);
    }
}

#[test]
fn paths_are_as_long_as_git_can_use_them() {
    for version in [2, 4] {
        for len in [4094, 4095, 4096, 4097] {
            let all = [made(&"p".repeat(len), 7), made("q", 8)];
            let parsed = Index::parse(index(version, Hash::Sha1, &all, &[]));
            let found = parsed.map(|index| entries(&index)[0].0.len());
            match len <= 4096 {
                true => assert_eq!(found, Ok(len)),
                false => assert_eq!(found, Err(Refusal("its entries are damaged"))),
            }
        }
    }
}

#[test]
fn hostile_bytes_are_refused_without_a_panic() {
    let mut random = Random(7);
    let mut known = 0;
    for round in 0..60_000 {
        let version = 2 + random.below(3) as u32;
        let hash = [Hash::Sha1, Hash::Sha256][random.below(2)];
        let all = random_entries(&mut random, version);
        let all = &all[..all.len().min(6)];
        let link = [
            vec![9; hash.len()],
            (0..24).map(|_| random.next() as u8).collect(),
        ]
        .concat();
        let untracked = (0..40).map(|_| random.next() as u8).collect();
        let extensions = [
            (b"UNTR", untracked),
            (b"link", link),
            (b"EOIE", vec![0; random.below(30)]),
        ];
        let mut bytes = index(version, hash, all, &extensions[..random.below(4)]);
        bytes.truncate(bytes.len() - hash.len());
        for _ in 0..random.below(4) {
            let at = random.below(bytes.len());
            bytes[at] = [0, 0xff, random.next() as u8][random.below(3)];
        }
        if random.below(4) == 0 {
            bytes.truncate(random.below(bytes.len()));
        }
        let sum = match round % 3 {
            0 => vec![0; hash.len()],
            _ => hash.of(&[&bytes]),
        };
        bytes.extend(sum);
        if let Ok(index) = Index::parse(bytes) {
            known += 1;
            entries(&index);
            let change = Change {
                location: Some((b"/a", b"/b")),
                base: None,
            };
            let _ = index.with(&change);
            let _ = index.each_replacement(&index, |_, _| Ok::<_, Refusal>(()));
        }
    }
    assert!(known > 10_000, "{known} were looked at");
}

#[test]
fn an_index_that_is_not_known_is_refused() {
    let all = [made("a", 1), made("b/c", 2)];
    let right = index(2, Hash::Sha1, &all, &[]);
    let why = |bytes: Vec<u8>| Index::parse(bytes).expect_err("it is wrong").0;
    let mut spoilt = right.clone();
    spoilt[30] ^= 1;
    assert!(why(spoilt).contains("checksum"));
    assert!(why(index(5, Hash::Sha1, &all, &[])).contains("version"));
    assert!(why(index(2, Hash::Sha1, &all, &[(b"next", Vec::new())])).contains("extension"));
    let nameless = [made("", 3), made("a", 1)];
    assert!(why(index(2, Hash::Sha1, &nameless, &[])).contains("extensions"));
    let mut more = made("a", 1);
    more.more_flags = true;
    assert!(why(index(2, Hash::Sha1, &[more], &[])).contains("entries"));
    for len in 0..right.len() {
        assert!(Index::parse(right[..len].to_vec()).is_err(), "{len}");
    }
}

#[test]
fn extensions_that_name_another_tree_are_changed() {
    let ident = b"Location /old tree, system Linux\0";
    let untracked = |ident: &[u8], len: u8| [&[len], ident, b"rest"].concat();
    let monitor = vec![7; 30];
    let eoie = |headers: &[u8]| [&[0, 0, 0, 99][..], &Hash::Sha1.of(&[headers])].concat();
    let all = [made("a", 1)];
    let before = [
        (b"UNTR", untracked(ident, ident.len() as u8)),
        (b"FSMN", monitor),
        (b"EOIE", eoie(b"")),
    ];
    let parsed = Index::parse(index(2, Hash::Sha1, &all, &before)).expect("it is right");
    let change = Change {
        location: Some((b"/old tree", b"/new")),
        base: None,
    };
    let ident = b"Location /new, system Linux\0";
    let headers = |len: u8| [&b"UNTR"[..], &[0, 0, 0, len]].concat();
    let new = untracked(ident, ident.len() as u8);
    let eoie_of_new = eoie(&headers(new.len() as u8));
    let expected = index(
        2,
        Hash::Sha1,
        &all,
        &[(b"UNTR", new), (b"EOIE", eoie_of_new)],
    );
    assert_eq!(parsed.with(&change), expected);
    // The cache of another tree stays.
    for from in [&b"/old"[..], b"/old tree, system", b"/new"] {
        let change = Change {
            location: Some((from, b"/new")),
            base: None,
        };
        let kept = parsed.with(&change);
        assert!(kept.windows(9).any(|bytes| bytes == b"/old tree"));
        assert!(!kept.windows(4).any(|bytes| bytes == b"FSMN"));
    }
    let mut long = Vec::new();
    put_varint(&mut long, 16_511);
    assert_eq!(long, [0xff, 0x7f]);
    put_varint(&mut long, 16_512);
    assert_eq!(take_varint(&mut &long[..]), Some(16_511));
    assert_eq!(take_varint(&mut &long[2..]), Some(16_512));
    assert_eq!(take_varint(&mut &[0xff; 12][..]), None);
}

fn git(dir: &Path, args: &[&str]) -> Vec<u8> {
    let out = Command::new("timeout")
        .args([
            "60",
            "git",
            "-c",
            "user.name=A",
            "-c",
            "user.email=a@example.org",
        ])
        .args(args)
        .current_dir(dir)
        .output()
        .expect("git is there");
    let told = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{args:?}: {told}");
    out.stdout
}

#[test]
fn indexes_of_git_are_read_as_git_reads_them() {
    for format in ["sha1", "sha256"] {
        for version in ["2", "3", "4"] {
            let dir = tempfile::tempdir().expect("there is room");
            let dir = dir.path();
            let format = format!("--object-format={format}");
            git(dir, &["init", "-q", &format]);
            let long = format!("{}/{}", "d".repeat(200), "f".repeat(200));
            let paths = [
                "a",
                "a.b",
                "dir/a",
                "dir/sub/b",
                "with space",
                "\u{e9}\n",
                &long,
            ];
            for path in paths {
                let path = dir.join(path);
                std::fs::create_dir_all(path.parent().expect("below")).expect("there is room");
                std::fs::write(path, "text").expect("there is room");
            }
            git(dir, &["add", "."]);
            std::fs::write(dir.join("new"), "text").expect("there is room");
            git(dir, &["add", "-N", "new"]);
            git(dir, &["update-index", "--skip-worktree", "a"]);
            git(dir, &["update-index", "--index-version", version]);
            git(
                dir,
                &[
                    "update-index",
                    "--untracked-cache",
                    "--force-untracked-cache",
                ],
            );
            git(dir, &["status"]);
            check(
                dir,
                Index::parse(std::fs::read(dir.join(".git/index")).expect("is there")),
            );
            git(dir, &["update-index", "--split-index"]);
            std::fs::write(dir.join("a.b"), "other text").expect("there is room");
            git(dir, &["update-index", "a.b"]);
            let bytes = std::fs::read(dir.join(".git/index")).expect("is there");
            let split = Index::parse(bytes.clone()).expect("it is right");
            assert_eq!(split.with(&Change::default()), bytes);
            let base = split.base().expect("it is split");
            let name: String = base.iter().map(|byte| format!("{byte:02x}")).collect();
            let shared = dir.join(format!(".git/sharedindex.{name}"));
            let shared = Index::parse(std::fs::read(shared).expect("is there"));
            let shared = shared.expect("it is right");
            assert_eq!(shared.checksum(), base);
            let mut replaced = Vec::new();
            let all = split.each_replacement(&shared, |path, place| {
                replaced.push((path.to_vec(), split.number(place)));
                Ok::<_, Refusal>(())
            });
            all.expect("it fits");
            let ino = std::os::unix::fs::MetadataExt::ino(
                &std::fs::metadata(dir.join("a.b")).expect("is there"),
            );
            assert!(
                replaced.contains(&(b"a.b".to_vec(), ino as u32)),
                "{replaced:?}"
            );
        }
    }
}

/// Compares paths and numbers with those that git shows.
fn check(dir: &Path, index: Answer<Index>) {
    let index = index.expect("it is right");
    let bytes = std::fs::read(dir.join(".git/index")).expect("is there");
    assert_eq!(index.with(&Change::default()), bytes);
    let found = entries(&index);
    let told = git(dir, &["ls-files", "-z", "--cached"]);
    let told: Vec<&[u8]> = told
        .split(|&byte| byte == 0)
        .filter(|path| !path.is_empty())
        .collect();
    let paths: Vec<&[u8]> = found.iter().map(|(path, _)| &path[..]).collect();
    assert_eq!(paths, told);
    for (path, number) in &found {
        let path = dir.join(String::from_utf8(path.clone()).expect("UTF-8"));
        let stat = std::fs::metadata(path).expect("is there");
        let ino = std::os::unix::fs::MetadataExt::ino(&stat) as u32;
        assert!(*number == ino || *number == 0, "{number} {ino}");
    }
    assert!(found.iter().filter(|(_, number)| *number != 0).count() >= 7);
}
