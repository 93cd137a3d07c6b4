//! The report: figures, series, tables.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::meter::{Cost, Profile};
use crate::peer::Peer;
use crate::throttle;

/// Which way is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Times, bytes, requests.
    Less,
    /// Rates.
    More,
}

/// A target that moves with the machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Relative {
    /// Share of it that is enough.
    pub share: f64,
    /// Of the rate of the file system in memory behind FUSE, else of the best peer's.
    pub of_floor: bool,
}

/// One cell of a table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// Short name of the experiment.
    pub experiment: String,
    /// The measured thing.
    pub name: String,
    /// Unit of the values.
    pub unit: String,
    /// Which way is good.
    pub better: Better,
    /// Kind of seconds in it; nothing for counts.
    pub profile: Option<Profile>,
    /// File system.
    pub peer: String,
    /// The target of Ramet, at scale 1.
    pub target: Option<f64>,
    /// The target as a share of the value of another one.
    #[serde(default)]
    pub relative: Option<Relative>,
    /// One for each repetition.
    pub values: Vec<f64>,
}

impl Figure {
    /// The middle value, or the mean of the two in the middle.
    pub fn median(&self) -> f64 {
        let mut sorted = self.values.clone();
        sorted.sort_by(f64::total_cmp);
        let Some(last) = sorted.len().checked_sub(1) else {
            return f64::NAN;
        };
        f64::midpoint(sorted[last / 2], sorted[sorted.len() / 2])
    }

    /// Distance of the largest from the smallest value, as a share of the median.
    pub fn spread(&self) -> f64 {
        let (least, most) = self
            .values
            .iter()
            .fold((f64::MAX, f64::MIN), |(least, most), v| {
                (least.min(*v), most.max(*v))
            });
        let median = self.median().abs();
        if median == 0.0 {
            0.0
        } else {
            (most - least) / median
        }
    }

    /// Whether both are values of the same cell.
    pub(crate) fn is_cell_of(&self, other: &Self) -> bool {
        (&self.experiment, &self.name, self.profile, &self.peer)
            == (&other.experiment, &other.name, other.profile, &other.peer)
    }

    fn row(&self) -> Row {
        (
            self.experiment.clone(),
            self.name.clone(),
            self.profile.map(|p| p.to_string()),
        )
    }
}

type Row = (String, String, Option<String>);

/// Values along something, for a plot; of the last repetition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Short name of the experiment.
    pub experiment: String,
    /// The measured thing, with its unit.
    pub name: String,
    /// Name of the axis.
    pub along: String,
    /// File system.
    pub peer: String,
    /// Both coordinates.
    pub points: Vec<(f64, f64)>,
}

/// All figures of a run, with its setup.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Share of the full size.
    pub scale: f64,
    /// Of contents and offsets.
    pub seed: u64,
    /// Of clone and edit.
    #[serde(default)]
    pub rounds: u32,
    /// The command lines of the runs.
    #[serde(default)]
    pub commands: Vec<String>,
    /// Kernel, processors, memory, versions of programs.
    pub machine: BTreeMap<String, String>,
    /// Cells.
    pub figures: Vec<Figure>,
    /// Lines of plots.
    pub series: Vec<Series>,
    /// Experiments that were left out, with the reason.
    pub left_out: Vec<String>,
}

impl Report {
    /// Takes in the report of another run: other experiments, or repetitions of the same.
    ///
    /// # Errors
    /// [`Error::Unlike`] when it ran at another scale, with another seed or number of rounds, or on
    /// another machine.
    pub fn join(&mut self, other: Self) -> Result<()> {
        if self.scale != other.scale {
            let scales = format!("scales {} and {}", self.scale, other.scale);
            return Err(Error::Unlike(scales));
        }
        let plans = [(self.seed, self.rounds), (other.seed, other.rounds)];
        if plans[0] != plans[1] {
            let both = plans.map(|(seed, rounds)| format!("seed {seed}, {rounds} rounds"));
            return Err(Error::Unlike(both.join(" and ")));
        }
        self.commands.extend(other.commands);
        for (what, found) in &other.machine {
            let known = self
                .machine
                .entry(what.clone())
                .or_insert_with(|| found.clone());
            if known != found {
                return Err(Error::Unlike(format!("{what}: {known} and {found}")));
            }
        }
        for figure in other.figures {
            self.add(figure);
        }
        for series in other.series {
            let is_same = |known: &Series| {
                (&known.experiment, &known.name, &known.peer)
                    == (&series.experiment, &series.name, &series.peer)
            };
            self.series.retain(|known| !is_same(known));
            self.series.push(series);
        }
        for left in other.left_out {
            if !self.left_out.contains(&left) {
                self.left_out.push(left);
            }
        }
        Ok(())
    }

    /// A new cell, or repetitions of one.
    fn add(&mut self, figure: Figure) {
        match self
            .figures
            .iter_mut()
            .find(|known| known.is_cell_of(&figure))
        {
            Some(known) => known.values.extend(figure.values),
            None => self.figures.push(figure),
        }
    }

    /// The rows in order, each with its cells.
    pub(crate) fn rows(&self) -> Vec<Vec<&Figure>> {
        let mut order: Vec<Row> = Vec::new();
        let mut cells: BTreeMap<Row, Vec<&Figure>> = BTreeMap::new();
        for figure in &self.figures {
            let row = figure.row();
            if !cells.contains_key(&row) {
                order.push(row.clone());
            }
            cells.entry(row).or_default().push(figure);
        }
        order
            .into_iter()
            .filter_map(|row| cells.remove(&row))
            .collect()
    }

    fn peers(&self) -> Vec<&str> {
        let mut found: Vec<&str> = Vec::new();
        for figure in &self.figures {
            if !found.contains(&figure.peer.as_str()) {
                found.push(&figure.peer);
            }
        }
        found
    }

    /// One table in Markdown: medians, the spread where it is more than one in twenty, Ramet over
    /// the best peer, and whether the target is held.
    pub fn markdown(&self) -> String {
        let peers = self.peers();
        let mut out = String::new();
        // Writing into a string cannot fail.
        let _ = writeln!(out, "Scale {}, seed {}.\n", self.scale, self.seed);
        for command in &self.commands {
            let _ = writeln!(out, "- `{command}`");
        }
        for (name, value) in &self.machine {
            let _ = writeln!(out, "- {name}: {value}");
        }
        let _ = writeln!(out, "\n| | | {} | best peer | target |", peers.join(" | "));
        let _ = writeln!(out, "| --- | --- |{}", " ---: |".repeat(peers.len() + 2));
        for row in self.rows() {
            let first = row[0];
            let profile = first.profile.map(|p| format!(" ({p})")).unwrap_or_default();
            let _ = write!(
                out,
                "| {} | {}, {}{profile} |",
                first.experiment, first.name, first.unit
            );
            for peer in &peers {
                let cell = row.iter().find(|figure| figure.peer == *peer);
                let _ = write!(
                    out,
                    " {} |",
                    cell.map_or("-".into(), |figure| shown(figure))
                );
            }
            let _ = writeln!(out, " {} | {} |", against(&row), self.judged(&row));
        }
        for left in &self.left_out {
            let _ = writeln!(out, "\nLeft out: {left}");
        }
        out
    }

    fn judged(&self, row: &[&Figure]) -> String {
        let Some(ramet) = row.iter().find(|f| f.peer == "ramet") else {
            return String::new();
        };
        let (target, shown) = match (ramet.target, ramet.relative) {
            (Some(target), _) => (target, number(target)),
            (None, Some(relative)) => {
                let floor = row.iter().find(|f| f.peer == "floor").map(|f| f.median());
                let (of, name) = if relative.of_floor {
                    (floor, "the floor")
                } else {
                    (best_of_others(row, ramet.better), "the best")
                };
                let Some(of) = of else {
                    return String::new();
                };
                (
                    of * relative.share,
                    format!("{} x {name}", number(relative.share)),
                )
            }
            (None, None) => return String::new(),
        };
        let sign = if ramet.better == Better::Less {
            "<="
        } else {
            ">="
        };
        let held = match ramet.better {
            Better::Less => ramet.median() <= target,
            Better::More => ramet.median() >= target,
        };
        let verdict = match (self.scale == 1.0, held) {
            (false, _) => "",
            (true, true) => " held",
            (true, false) => " **missed**",
        };
        format!("{sign} {shown}{verdict}")
    }
}

/// Ramet over the best of the others.
fn against(row: &[&Figure]) -> String {
    let Some(ramet) = row.iter().find(|f| f.peer == "ramet") else {
        return String::new();
    };
    match best_of_others(row, ramet.better) {
        // A figure below zero has no ratio.
        Some(best) if best > 0.0 && ramet.median() >= 0.0 => {
            format!("{:.2}x", ramet.median() / best)
        }
        _ => String::new(),
    }
}

fn best_of_others(row: &[&Figure], better: Better) -> Option<f64> {
    let others = row
        .iter()
        .filter(|f| !f.peer.starts_with("ramet") && f.peer != "floor");
    others.map(|f| f.median()).reduce(|a, b| match better {
        Better::Less => a.min(b),
        Better::More => a.max(b),
    })
}

fn shown(figure: &Figure) -> String {
    let spread = figure.spread();
    if figure.values.len() > 1 && spread > 0.05 {
        return format!("{} ±{:.0} %", number(figure.median()), spread * 50.0);
    }
    number(figure.median())
}

/// Three digits that count.
fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        v if v >= 0.01 => format!("{value:.4}"),
        _ => format!("{value:.2e}"),
    }
}

/// Targets by kind of seconds.
#[derive(Clone, Copy, Default)]
pub(crate) struct Targets {
    pub raw: Option<f64>,
    pub gp3: Option<f64>,
    pub hdd: Option<f64>,
    pub relative: &'static [(Profile, Relative)],
}

/// That of one cell.
#[derive(Default)]
struct Target {
    value: Option<f64>,
    relative: Option<Relative>,
}

impl From<Option<f64>> for Target {
    fn from(value: Option<f64>) -> Self {
        Self {
            value,
            relative: None,
        }
    }
}

impl Targets {
    fn of(self, profile: Profile) -> Target {
        let value = match profile {
            Profile::Raw => self.raw,
            Profile::Gp3 => self.gp3,
            Profile::Hdd => self.hdd,
        };
        let relative = self.relative.iter().find(|(known, _)| *known == profile);
        Target {
            value,
            relative: relative.map(|(_, relative)| *relative),
        }
    }
}

/// Takes the figures of one experiment on one file system in one pass.
pub(crate) struct Findings<'a> {
    pub report: &'a mut Report,
    pub experiment: String,
    pub peer: Peer,
    /// Counts are taken in one pass only.
    pub counts: bool,
    pub wanted: &'a [Profile],
}

impl Findings<'_> {
    fn add(
        &mut self,
        name: &str,
        unit: &str,
        better: Better,
        profile: Option<Profile>,
        target: impl Into<Target>,
        value: f64,
    ) {
        // The rate of a phase without any time says nothing.
        if !value.is_finite() {
            return;
        }
        let target = target.into();
        let figure = Figure {
            experiment: self.experiment.clone(),
            name: name.to_string(),
            unit: unit.to_string(),
            better,
            profile,
            peer: self.peer.to_string(),
            target: target.value,
            relative: target.relative,
            values: vec![value],
        };
        self.report.add(figure);
    }

    /// Seconds of the requests of a phase by simpler rules, beside its own seconds.
    fn beside(
        &mut self,
        name: &str,
        unit: &str,
        better: Better,
        cost: &Cost,
        of: impl Fn(f64) -> f64,
    ) {
        if cost.throttled && self.wanted.contains(&Profile::Gp3) {
            let name = format!("{name}: least for its merged requests");
            let least = of(throttle::least_s(&cost.requests));
            self.add(&name, unit, better, Some(Profile::Gp3), None, least);
        }
        if let Some(disk) = cost.disk
            && self.wanted.contains(&Profile::Hdd)
        {
            let name = format!("{name}: each jump a mean seek");
            let plain = of(disk.plain_s);
            self.add(&name, unit, better, Some(Profile::Hdd), None, plain);
        }
    }

    /// Something that has no seconds in it.
    pub fn count(&mut self, name: &str, unit: &str, value: f64, target: Option<f64>) {
        if self.counts {
            self.add(name, unit, Better::Less, None, target, value);
        }
    }

    /// `factor` times the seconds of a phase, in `unit`.
    pub fn time(&mut self, name: &str, unit: &str, factor: f64, cost: &Cost, targets: Targets) {
        for (profile, seconds) in self.profiles(cost) {
            self.add(
                name,
                unit,
                Better::Less,
                Some(profile),
                targets.of(profile),
                seconds * factor,
            );
        }
        self.beside(name, unit, Better::Less, cost, |seconds| seconds * factor);
    }

    /// Seconds of a phase.
    pub fn seconds(&mut self, name: &str, cost: &Cost, targets: Targets) {
        self.time(name, "s", 1.0, cost, targets);
    }

    /// `amount` by the seconds of a phase.
    pub fn rate(&mut self, name: &str, unit: &str, amount: f64, cost: &Cost, targets: Targets) {
        for (profile, seconds) in self.profiles(cost) {
            self.add(
                name,
                unit,
                Better::More,
                Some(profile),
                targets.of(profile),
                amount / seconds,
            );
        }
        self.beside(name, unit, Better::More, cost, |seconds| amount / seconds);
    }

    /// Seconds of a phase over those of another.
    pub fn ratio(&mut self, name: &str, cost: &Cost, over: &Cost, targets: Targets) {
        for ((profile, seconds), (_, before)) in
            self.profiles(cost).into_iter().zip(self.profiles(over))
        {
            if before > 0.0 {
                self.add(
                    name,
                    "x",
                    Better::Less,
                    Some(profile),
                    targets.of(profile),
                    seconds / before,
                );
            }
        }
    }

    /// Milliseconds by which a phase grew in each of `steps` steps.
    pub fn growth(&mut self, name: &str, first: &Cost, last: &Cost, steps: u32, targets: Targets) {
        for ((profile, seconds), (_, before)) in
            self.profiles(last).into_iter().zip(self.profiles(first))
        {
            let each = (seconds - before) * 1e3 / f64::from(steps);
            self.add(
                name,
                "ms",
                Better::Less,
                Some(profile),
                targets.of(profile),
                each,
            );
        }
    }

    /// Milliseconds of one call, as they came.
    pub fn latency(&mut self, name: &str, ms: f64, target: Option<f64>) {
        if self.wanted.contains(&Profile::Raw) {
            self.add(name, "ms", Better::Less, Some(Profile::Raw), target, ms);
        }
    }

    /// Points of a plot.
    pub fn series(&mut self, name: &str, along: &str, points: Vec<(f64, f64)>) {
        let series = Series {
            experiment: self.experiment.clone(),
            name: name.to_string(),
            along: along.to_string(),
            peer: self.peer.to_string(),
            points,
        };
        self.report.series.retain(|s| {
            (&s.experiment, &s.name, &s.peer) != (&series.experiment, &series.name, &series.peer)
        });
        self.report.series.push(series);
    }

    fn profiles(&self, cost: &Cost) -> Vec<(Profile, f64)> {
        let mut all = cost.seconds();
        all.retain(|(profile, _)| self.wanted.contains(profile));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(peer: &str, values: &[f64]) -> Figure {
        Figure {
            experiment: "E1".into(),
            name: "space".into(),
            unit: "x".into(),
            better: Better::Less,
            profile: None,
            peer: peer.into(),
            target: Some(6.0),
            relative: None,
            values: values.into(),
        }
    }

    fn report(figures: Vec<Figure>) -> Report {
        Report {
            scale: 1.0,
            seed: 1,
            rounds: 16,
            commands: Vec::new(),
            machine: BTreeMap::new(),
            figures,
            series: Vec::new(),
            left_out: Vec::new(),
        }
    }

    #[test]
    fn joined_reports_have_the_cells_of_both_and_all_repetitions() {
        let line = |at: f64| Series {
            experiment: "E8".into(),
            name: "unlink, ms".into(),
            along: "bytes".into(),
            peer: "ramet".into(),
            points: vec![(at, at)],
        };
        let mut joined = report(vec![figure("ramet", &[3.0]), figure("xfs", &[30.0])]);
        joined.series.push(line(1.0));
        let mut other = report(vec![figure("ramet", &[5.0, 4.0]), figure("ext4", &[9.0])]);
        other.series.push(line(2.0));
        other.machine.insert("kernel".into(), "6.18".into());
        other.left_out.push("E9".into());
        joined.join(other.clone()).unwrap();
        let expected = [
            figure("ramet", &[3.0, 5.0, 4.0]),
            figure("xfs", &[30.0]),
            figure("ext4", &[9.0]),
        ];
        assert_eq!(joined.figures, expected);
        assert_eq!(joined.series, [line(2.0)]);
        assert_eq!((joined.machine.len(), joined.left_out.len()), (1, 1));
        let unlike = |change: &dyn Fn(&mut Report)| {
            let mut other = other.clone();
            change(&mut other);
            joined.clone().join(other).unwrap_err().to_string()
        };
        let scale = unlike(&|other| other.scale = 0.1);
        assert!(scale.contains("scales 1 and 0.1"), "{scale}");
        let seed = unlike(&|other| other.seed = 2);
        assert!(seed.contains("seed 2, 16 rounds"), "{seed}");
        let kernel = unlike(&|other| _ = other.machine.insert("kernel".into(), "6.1".into()));
        assert!(kernel.contains("kernel: 6.18 and 6.1"), "{kernel}");
    }

    #[test]
    fn the_median_lies_in_the_middle() {
        let median = |values: &[f64]| figure("ramet", values).median();
        assert_eq!(median(&[9.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn a_table_shows_medians_spreads_and_verdicts() {
        let mut report = report(vec![
            figure("ramet", &[3.0, 2.0, 8.0]),
            figure("xfs", &[30.0]),
        ]);
        let table = report.markdown();
        assert!(
            table.contains("| E1 | space, x | 3.00 ±100 % | 30.0 | 0.10x | <= 6.00 held |"),
            "{table}"
        );
        report.figures[0].values = vec![7.0];
        assert!(report.markdown().contains("**missed**"));
        report.scale = 0.5;
        assert!(!report.markdown().contains("missed"));
    }

    #[test]
    fn a_target_may_be_a_share_of_a_rate_of_others() {
        let mut rate = figure("ramet", &[8.0]);
        (rate.better, rate.target) = (Better::More, None);
        let of = |of_floor| {
            Some(Relative {
                share: 0.9,
                of_floor,
            })
        };
        let others = ["xfs", "floor"].map(|peer| Figure {
            peer: peer.into(),
            better: Better::More,
            values: vec![if peer == "xfs" { 20.0 } else { 5.0 }],
            ..figure(peer, &[])
        });
        for (of_floor, verdict) in [
            (true, ">= 0.9000 x the floor held"),
            (false, ">= 0.9000 x the best **missed**"),
        ] {
            rate.relative = of(of_floor);
            let figures = [vec![rate.clone()], others.to_vec()].concat();
            let table = report(figures).markdown();
            assert!(table.contains(verdict), "{table}");
        }
    }

    #[test]
    fn figures_below_zero_have_no_ratio() {
        let table = report(vec![figure("ramet", &[-1.0]), figure("xfs", &[-2.0])]).markdown();
        assert!(table.contains("| -1.00 | -2.00 |  |"), "{table}");
    }
}
