//! The daemon, `ramet fsck` and `ramet stat` stay within their memory budget plus 64 MiB.
//!
//! A volume is mounted for each setting: a limit of `RAMET_LIMITS_MIB` (`64`) without a control
//! group, or the default limit inside a group of 300 MB, with the clients outside (`group`) or
//! inside of it (`inside`); `RAMET_SETTINGS` chooses among `alone,group,inside`. All loads follow
//! each other on it ([`ramet_e2e::loads`]), then scrub and `du`, and after the mount fsck, stat and
//! a mount that is read only. The peak of each is measured by itself. `RAMET_SCALE` is the size in
//! millionths (500): 1,000,000 is 2,000,000 files, 100,000 clones, 3 GiB. With `RAMET_RINGS=1`
//! requests come through io_uring as well, which must be switched on. The table is printed.
//!
//! Groups are of version 1. Without its memory controller the settings in a group are left out.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

use ramet_e2e::loads::{Load, Size, in_group, run_as_client};
use ramet_e2e::{Bed, Mount, number, ramet_bin, run_ok};

const MIB: u64 = 1 << 20;
/// Memory that may lie above the budget.
const ABOVE: u64 = 64 * MIB;
const GROUP_BYTES: u64 = 300_000_000;
/// Pinned inodes may take more than this part of the budget.
const INODES_PART: u64 = 8;

#[test]
fn client() {
    run_as_client();
}

/// A control group of version 1, removed at the end.
struct Group(PathBuf);

impl Group {
    fn new(name: &str) -> Option<Group> {
        let all = Path::new("/sys/fs/cgroup/memory");
        if !all.join("memory.limit_in_bytes").exists() {
            return None;
        }
        let group = Group(all.join(format!("ramet-e2e-{}-{name}", std::process::id())));
        fs::create_dir(&group.0).expect("tests run as root");
        let limit = group.0.join("memory.limit_in_bytes");
        fs::write(limit, GROUP_BYTES.to_string()).expect("a limit");
        Some(group)
    }

    /// Processes of the group that the kernel has killed for want of memory.
    fn kills(&self) -> u64 {
        let told = fs::read_to_string(self.0.join("memory.oom_control")).expect("a group");
        let line = told.lines().find_map(|line| line.strip_prefix("oom_kill "));
        line.map_or(0, |count| count.parse().expect("a count"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Fails while a daemon is in it, and then the test fails too.
        let _ = fs::remove_dir(&self.0);
    }
}

/// Where daemon and clients run, and with which limit.
struct Setting {
    title: String,
    limit_mib: Option<u64>,
    transport: &'static str,
    group: Option<Group>,
    is_client_inside: bool,
}

fn settings() -> Vec<Setting> {
    let list = |name: &str, usual: &str| -> Vec<String> {
        let list = std::env::var(name).unwrap_or_else(|_| usual.into());
        list.split(',').map(str::to_owned).collect()
    };
    let rings = (number("RAMET_RINGS", 0) > 0).then_some("io_uring");
    let mut settings = Vec::new();
    for transport in ["no_io_uring"].into_iter().chain(rings) {
        for kind in list("RAMET_SETTINGS", "alone,inside") {
            if kind == "alone" {
                for limit in list("RAMET_LIMITS_MIB", "64") {
                    settings.push(Setting {
                        title: format!("{limit} MiB, {transport}"),
                        limit_mib: Some(limit.parse().expect("a number of MiB")),
                        transport,
                        group: None,
                        is_client_inside: false,
                    });
                }
                continue;
            }
            let Some(group) = Group::new(&format!("{kind}-{transport}")) else {
                continue;
            };
            settings.push(Setting {
                title: format!("{kind}, {transport}"),
                limit_mib: None,
                transport,
                group: Some(group),
                is_client_inside: kind == "inside",
            });
        }
    }
    settings
}

/// Peaks of one setting, with all that lay above the limit.
struct Table {
    setting: String,
    limit: u64,
    lines: Vec<String>,
    above: Vec<String>,
}

impl Table {
    fn add(&mut self, what: &str, peak: u64, pinned: u64, begun: Instant) {
        let line = format!(
            "| {} | {what} | {} | {} | {} | {:.1} |",
            self.setting,
            self.limit / MIB,
            peak / MIB,
            pinned / MIB,
            begun.elapsed().as_secs_f64()
        );
        println!("{line}");
        if peak > self.limit + ABOVE + pinned {
            self.above.push(line.clone());
        }
        self.lines.push(line);
    }
}

impl Setting {
    fn mount(&self, bed: &Bed, options: &str) -> Mount {
        let group = self.group.as_ref().map(|group| group.0.as_path());
        let mut command = in_group(group, ramet_bin());
        command
            .arg("mount")
            .args(["-o", self.transport, "-o", options]);
        if let Some(mib) = self.limit_mib {
            command.arg("--memory").arg(format!("{mib}M"));
        }
        command.arg("--log").arg(bed.path().join("daemon.log"));
        command.args([bed.volume(), bed.mount_point()]);
        let done = command.stdin(Stdio::null()).status().expect("it runs");
        assert!(done.success(), "{}: mount: {done}", self.title);
        bed.mounted()
    }

    /// Runs a command of ramet to its end, and tells its peak.
    fn command(&self, table: &mut Table, what: &str, args: &[&OsStr]) {
        let begun = Instant::now();
        let group = self.group.as_ref().map(|group| group.0.as_path());
        let mut command = in_group(group, ramet_bin());
        command.arg(args[0]);
        if let Some(mib) = self.limit_mib {
            command.arg("--memory").arg(format!("{mib}M"));
        }
        command.args(&args[1..]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut child = command.spawn().expect("it runs");
        let status = format!("/proc/{}/status", child.id());
        let mut peak = 0;
        let ended = loop {
            let told = fs::read_to_string(&status).unwrap_or_default();
            let line = told.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
            peak = peak.max(kib.unwrap_or(0) * 1024);
            if let Some(ended) = child.try_wait().expect("it is our child") {
                break ended;
            }
            std::thread::yield_now();
        };
        assert!(ended.success(), "{}: {what}: {ended}", self.title);
        table.add(what, peak, 0, begun);
    }
}

/// A mount whose peak is measured from now on.
struct Watched<'a> {
    mount: &'a Mount,
    begun: Instant,
}

impl Watched<'_> {
    fn of(mount: &Mount) -> Watched<'_> {
        let clear = format!("/proc/{}/clear_refs", mount.pid().as_raw_pid());
        fs::write(clear, "5").expect("tests run as root");
        Watched {
            mount,
            begun: Instant::now(),
        }
    }

    fn tell(self, table: &mut Table, what: &str) {
        let stat = self.mount.stat();
        let inodes = stat["memory_inodes_bytes"].as_u64().expect("a counter");
        let pinned = inodes.saturating_sub(table.limit / INODES_PART);
        table.add(what, self.mount.memory("VmHWM"), pinned, self.begun);
    }
}

fn on_the_mount(setting: &Setting, mount: &Mount, size: &Size, table: &mut Table) {
    let path = mount.root().to_str().expect("UTF-8");
    let group = setting.group.as_ref().map(|group| group.0.as_path());
    let client_group = group.filter(|_| setting.is_client_inside);
    for load in Load::ALL {
        let watched = Watched::of(mount);
        load.run(mount.root(), size, client_group);
        watched.tell(table, &load.title(size));
    }
    let tools: [&[&str]; 3] = [
        &["sync", "--checkpoint", path],
        &["scrub", "--fast", path],
        &["du", path],
    ];
    for tool in tools {
        let watched = Watched::of(mount);
        run_ok(ramet_bin(), tool);
        watched.tell(table, tool[0]);
    }
}

fn measure(setting: &Setting, size: &Size) -> Table {
    let bed = Bed::new("64G");
    let mount = setting.mount(&bed, "rw");
    let limit = mount.stat()["memory_limit_bytes"].as_u64();
    let mut table = Table {
        setting: setting.title.clone(),
        limit: limit.expect("a counter"),
        lines: Vec::new(),
        above: Vec::new(),
    };
    on_the_mount(setting, &mount, size, &mut table);
    // A journal to recover from, and no checkpoint.
    let written = mount.root().join("after the checkpoint");
    fs::create_dir(&written).expect("it is new");
    for number in 0..size.mib.min(200) * 10 {
        fs::write(written.join(number.to_string()), vec![1; 100_000]).expect("there is room");
    }
    run_ok(ramet_bin(), &["sync".as_ref(), mount.root().as_os_str()]);
    mount.kill_daemon();
    mount.detach_dead();
    let volume = bed.volume();
    setting.command(
        &mut table,
        "stat after kill -9",
        &["stat".as_ref(), volume.as_ref()],
    );
    setting.command(
        &mut table,
        "fsck after kill -9",
        &["fsck".as_ref(), volume.as_ref()],
    );
    for options in ["ro", "rw"] {
        let begun = Instant::now();
        let mount = setting.mount(&bed, options);
        let peak = mount.memory("VmHWM");
        table.add(&format!("mount {options} after kill -9"), peak, 0, begun);
        mount.umount();
    }
    setting.command(&mut table, "fsck", &["fsck".as_ref(), volume.as_ref()]);
    if let Some(group) = &setting.group {
        assert_eq!(group.kills(), 0, "{}: the kernel has killed", setting.title);
    }
    table
}

#[test]
fn peaks_stay_within_the_budget() {
    let size = Size::of(number("RAMET_SCALE", 500));
    let (mut lines, mut above) = (Vec::new(), Vec::new());
    for setting in settings() {
        let table = measure(&setting, &size);
        lines.extend(table.lines);
        above.extend(table.above);
    }
    println!(
        "| setting | load | limit, MiB | peak, MiB | pinned inodes above an eighth, MiB | s |"
    );
    println!(
        "| --- | --- | ---: | ---: | ---: | ---: |\n{}",
        lines.join("\n")
    );
    assert!(above.is_empty(), "above the limit:\n{}", above.join("\n"));
}
