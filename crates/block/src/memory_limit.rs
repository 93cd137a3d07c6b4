//! The memory that a process may take when nobody says a limit: the least of a quarter of the
//! machine's memory and half of its control group's.
//!
//! A control group limits itself and all below it, so the groups above count as well. Of version 2
//! the limits lie in `memory.max` and `memory.high`, of version 1 in `memory.limit_in_bytes`; where
//! several are mounted, whichever controls memory has them.

use std::path::{Path, PathBuf};

/// The limit of the calling process, in bytes, if nobody chose one.
#[must_use]
pub fn memory_limit() -> u64 {
    limit_from(Path::new("/"))
}

/// The file that tells the memory pressure of the control group of the calling process alone, and
/// of those below it; `None` unless the process is in a group of version 2 that is not the root of
/// the hierarchy.
#[must_use]
pub fn group_pressure_file() -> Option<PathBuf> {
    pressure_file_from(Path::new("/"))
}

/// Whether less than an eighth of the machine's memory can be had without taking it away from
/// programs.
#[must_use]
pub fn is_memory_low() -> bool {
    std::fs::read_to_string("/proc/meminfo").is_ok_and(|meminfo| is_low(&meminfo))
}

/// Resident memory of the process itself, in bytes, without the program's text and shared pages;
/// `None` without `/proc`.
#[must_use]
pub(crate) fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let mut fields = statm.split(' ').map(str::parse::<u64>);
    let (resident, shared) = (fields.nth(1)?.ok()?, fields.next()?.ok()?);
    Some(resident.saturating_sub(shared) * PAGE_BYTES)
}

const PAGE_BYTES: u64 = 4096;

/// Without `/proc/meminfo`.
const RAM_UNKNOWN: u64 = 1 << 30;
/// The least limit that is useful, in bytes. A smaller choice counts as this one.
pub const LIMIT_MIN: u64 = 16 << 20;

/// The same where the files of the kernel lie below `root`.
fn limit_from(root: &Path) -> u64 {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let machine = total_bytes(&read("proc/meminfo")).unwrap_or(RAM_UNKNOWN) / 4;
    let groups = group_limit(
        root,
        &read("proc/self/cgroup"),
        &read("proc/self/mountinfo"),
    );
    let limit = groups.map_or(machine, |group| machine.min(group / 2));
    limit.max(LIMIT_MIN)
}

fn total_bytes(meminfo: &str) -> Option<u64> {
    field_bytes(meminfo, "MemTotal:")
}

fn field_bytes(meminfo: &str, field: &str) -> Option<u64> {
    let found = meminfo.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = found.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

fn is_low(meminfo: &str) -> bool {
    let fields = ["MemAvailable:", "MemTotal:"].map(|field| field_bytes(meminfo, field));
    matches!(fields, [Some(available), Some(total)] if available < total / 8)
}

fn pressure_file_from(root: &Path) -> Option<PathBuf> {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let (cgroup, mountinfo) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let hierarchies = hierarchies(&cgroup, &mountinfo);
    let groups = hierarchies.iter().map(|hierarchy| hierarchy.own(root));
    // The root of the hierarchy has no limit, and its pressure is the machine's.
    let mut limited = groups.filter(|group| group.join("memory.max").exists());
    let file = limited.next()?.join("memory.pressure");
    file.exists().then_some(file)
}

/// A hierarchy of control groups that may limit memory: the files of a group that tell its limits.
struct Hierarchy {
    files: &'static [&'static str],
    /// Where it is mounted, below the root of the file system.
    dir: PathBuf,
    /// The group that `dir` shows.
    shown: PathBuf,
    /// That of the process.
    group: PathBuf,
}

/// The least limit of the groups of the process, in bytes; `None` if nothing limits them.
fn group_limit(root: &Path, cgroup: &str, mountinfo: &str) -> Option<u64> {
    hierarchies(cgroup, mountinfo)
        .iter()
        .filter_map(|hierarchy| hierarchy.limit(root))
        .min()
}

fn hierarchies(cgroup: &str, mountinfo: &str) -> Vec<Hierarchy> {
    let mut found = Vec::new();
    for line in cgroup.lines() {
        // `4:memory:/group` of version 1, `0::/group` of version 2.
        let mut fields = line.splitn(3, ':');
        let (Some(number), Some(controllers), Some(group)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let (kind, files): (&str, &[&str]) = if number == "0" && controllers.is_empty() {
            ("cgroup2", &["memory.max", "memory.high"])
        } else if controllers.split(',').any(|one| one == "memory") {
            ("cgroup", &["memory.limit_in_bytes"])
        } else {
            continue;
        };
        let mounts = mountinfo.lines().filter_map(|line| mount(line, kind));
        found.extend(mounts.map(|(shown, dir)| Hierarchy {
            files,
            dir,
            shown,
            group: group.into(),
        }));
    }
    found
}

/// The group that a line of `mountinfo` shows and where, relative to the root of the file system,
/// if it is a mount of control groups of this kind, with memory among them.
fn mount(line: &str, kind: &str) -> Option<(PathBuf, PathBuf)> {
    let (mount, source) = line.split_once(" - ")?;
    let mut source = source.split(' ');
    let (fstype, options) = (source.next()?, source.nth(1)?);
    let has_memory = kind == "cgroup2" || options.split(',').any(|one| one == "memory");
    if fstype != kind || !has_memory {
        return None;
    }
    let mut fields = mount.split(' ').skip(3);
    let (shown, dir) = (fields.next()?, fields.next()?);
    Some((shown.into(), dir.trim_start_matches('/').into()))
}

impl Hierarchy {
    /// The group of the process, below the directory where the hierarchy is mounted.
    fn below(&self) -> &Path {
        // A container may see its own group as the root of the hierarchy.
        let below = self.group.strip_prefix(&self.shown).ok();
        let below = below.unwrap_or(Path::new(""));
        below.strip_prefix("/").unwrap_or(below)
    }

    /// The directory of the group of the process.
    fn own(&self, root: &Path) -> PathBuf {
        root.join(&self.dir).join(self.below())
    }

    /// The least limit of the group and of those above it that can be seen.
    fn limit(&self, root: &Path) -> Option<u64> {
        let top = root.join(&self.dir);
        let groups = self.below().ancestors().map(|group| top.join(group));
        let limits = groups.flat_map(|group| self.files.iter().map(move |file| group.join(file)));
        limits.filter_map(|file| limit_in(&file)).min()
    }
}

/// The limit that a file tells; `None` for `max`, which is none, and for no such file. Version 1
/// tells no limit as a number that is larger than the memory of any machine.
fn limit_in(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MEMINFO: &str = "MemTotal:        8388608 kB\nMemFree:          100 kB\n";
    const V1: &str = "30 24 0:26 / /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory\n\
        31 24 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
    const V2: &str = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";

    /// The limit where these files lie below the root.
    fn limit(files: &[(&str, &str)]) -> u64 {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in [("proc/meminfo", MEMINFO)].iter().chain(files) {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        limit_from(root.path())
    }

    #[test]
    fn a_machine_without_groups_gives_a_quarter() {
        assert_eq!(limit(&[]), 2 * GIB);
        let group = ("proc/self/cgroup", "0::/\n");
        assert_eq!(limit(&[group, ("proc/self/mountinfo", V2)]), 2 * GIB);
    }

    #[test]
    fn half_of_the_least_limit_of_version_2_counts() {
        let group = ("proc/self/cgroup", "0::/system.slice/builds/one\n");
        let mounts = ("proc/self/mountinfo", V2);
        let dir = "sys/fs/cgroup/system.slice";
        let file = |name: &str| format!("{dir}/{name}");
        let (one, above, high) = (
            file("builds/one/memory.max"),
            file("memory.max"),
            file("builds/memory.high"),
        );
        let max = (&*one, "max\n");
        assert_eq!(limit(&[group, mounts, max]), 2 * GIB);
        let above = (&*above, "1073741824\n");
        assert_eq!(limit(&[group, mounts, max, above]), GIB / 2);
        let high = (&*high, "268435456\n");
        assert_eq!(limit(&[group, mounts, max, above, high]), GIB / 8);
    }

    #[test]
    fn half_of_the_least_limit_of_version_1_counts() {
        let group = (
            "proc/self/cgroup",
            "5:cpu:/other\n4:cpuset,memory:/jobs/one\n0::/\n",
        );
        let mounts = ("proc/self/mountinfo", V1);
        let dir = "sys/fs/cgroup/memory";
        let file = |name: &str| format!("{dir}/{name}/memory.limit_in_bytes");
        let (one, jobs, other) = (file("jobs/one"), file("jobs"), file("other"));
        let unlimited = (&*one, "9223372036854771712\n");
        assert_eq!(limit(&[group, mounts, unlimited]), 2 * GIB);
        let one = (&*one, "314572800\n");
        let other = (&*other, "1048576\n");
        assert_eq!(limit(&[group, mounts, one, other]), 150 << 20);
        let jobs = (&*jobs, "209715200\n");
        assert_eq!(limit(&[group, mounts, one, jobs]), 100 << 20);
    }

    #[test]
    fn a_container_that_sees_its_own_group_only_reads_that() {
        let shown = "30 24 0:26 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let file = "sys/fs/cgroup/memory/memory.limit_in_bytes";
        let files = [
            ("proc/self/cgroup", "4:memory:/docker/abc\n"),
            ("proc/self/mountinfo", shown),
            (file, "536870912\n"),
        ];
        assert_eq!(limit(&files), GIB / 4);
        // The name of the group may be one of the machine's, where the mount has no part of it.
        let files = [("proc/self/cgroup", "4:memory:/../x\n"), files[1], files[2]];
        assert_eq!(limit(&files), GIB / 4);
    }

    #[test]
    fn only_a_group_below_the_root_has_a_pressure_of_its_own() {
        let found = |group: &str, files: &[&str]| {
            let root = tempfile::tempdir().unwrap();
            for (path, text) in [("proc/self/cgroup", group), ("proc/self/mountinfo", V2)]
                .into_iter()
                .chain(files.iter().map(|path| (*path, "")))
            {
                let path = root.path().join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            let file = pressure_file_from(root.path());
            file.map(|file| file.strip_prefix(root.path()).unwrap().to_owned())
        };
        let machine = "sys/fs/cgroup/memory.pressure";
        let [max, own] = ["max", "pressure"].map(|end| format!("sys/fs/cgroup/jobs/memory.{end}"));
        let files = [machine, &max, &own];
        assert_eq!(found("0::/jobs\n", &files), Some(PathBuf::from(&own)));
        assert_eq!(found("0::/jobs\n", &files[..2]), None);
        assert_eq!(found("0::/\n", &files), None);
        assert_eq!(found("4:memory:/jobs\n", &files), None);
    }

    #[test]
    fn memory_is_low_when_less_than_an_eighth_is_available() {
        let meminfo = |kib: u64| format!("{MEMINFO}MemAvailable: {kib} kB\n");
        assert!(is_low(&meminfo((1 << 20) - 1)) && !is_low(&meminfo(1 << 20)));
        assert!(!is_low(MEMINFO));
    }

    #[test]
    fn odd_files_limit_nothing_and_a_tiny_limit_is_raised() {
        let odd = [
            ("proc/self/cgroup", "memory\n4\n:::\n0::/a\n4:memory:/a\n"),
            (
                "proc/self/mountinfo",
                "30 24 - cgroup2\n - \nx - cgroup cgroup rw,memory\n",
            ),
        ];
        assert_eq!(limit(&odd), 2 * GIB);
        let files = [
            ("proc/self/cgroup", "0::/\n"),
            ("proc/self/mountinfo", V2),
            ("sys/fs/cgroup/memory.max", "1000000\n"),
        ];
        assert_eq!(limit(&files), LIMIT_MIN);
    }

    #[test]
    fn this_process_has_memory_of_its_own() {
        assert!(resident_bytes().unwrap() > 0 && memory_limit() >= LIMIT_MIN);
    }
}
