//! Plots in SVG, drawn from a report.

use std::path::{Path, PathBuf};

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::error::{Error, Result};
use crate::report::{Figure, Report, Series};

const SIZE: (u32, u32) = (800, 420);
const FONT: &str = "sans-serif";
const AXIS_LEAST: f64 = 1e-6;

/// Which tables and figures of the papers show the same: BetrFS 0.5, copy on abundant write, and
/// BetrFS 0.2.
const PAPERS: [(&str, &str); 9] = [
    ("E1", "CAW figures 1, 9"),
    ("E2", "CAW figures 2, 10"),
    ("E3", "CAW figure 11, BetrFS 0.2 figure 5"),
    ("E4", "CAW table 1, BetrFS 0.2 table 2, figure 10"),
    ("E5", "CAW figure 12, BetrFS 0.2 figure 8"),
    ("E6", "CAW table 2, BetrFS 0.2 table 1"),
    ("E7", "CAW figure 13, BetrFS 0.2 figure 9"),
    ("E8", "BetrFS 0.2 figures 4, 6, 7"),
    ("E9", "CAW table 3"),
];
/// The cost of a clone against the cost of reading it: experiment, and the rows along both axes.
const TRADEOFF: (&str, &str, &str) = (
    "E1",
    "space per byte written in a clone",
    "cold grep of the clone",
);

type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

impl Report {
    /// Draws a bar chart for each row in which several file systems are, lines for each series, and
    /// space against locality; returns the files. Their names say which experiment it is, and which
    /// tables and figures of the papers show the same.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn plot(&self, dir: &Path) -> Result<Vec<PathBuf>> {
        let mut made = Vec::new();
        let mut draw = |name: &str, drawn: &dyn Fn(DrawingArea<SVGBackend<'_>, Shift>) -> Drawn| {
            let path = dir.join(format!("{}.svg", slug(name)));
            let area = SVGBackend::new(&path, SIZE).into_drawing_area();
            drawn(area).map_err(|e| Error::Unexpected(format!("{}: {e}", path.display())))?;
            made.push(path);
            Ok::<(), Error>(())
        };
        let rows = self.rows();
        for row in rows.iter().filter(|row| row.len() > 1) {
            let profile = profile_of(row);
            let name = format!("{} {}{profile}", of_papers(&row[0].experiment), row[0].name);
            draw(&name, &|area| bars(&area, &name, row))?;
        }
        let (experiment, x, y) = TRADEOFF;
        let called = |name: &'static str| {
            rows.iter()
                .filter(move |row| row[0].experiment == experiment && row[0].name == name)
        };
        if let Some(xs) = called(x).next() {
            for ys in called(y).filter(|ys| ys.len() > 1) {
                let profile = profile_of(ys);
                let name = format!("{} space against {y}{profile}", of_papers(experiment));
                let places: Vec<Place<'_>> = xs
                    .iter()
                    .filter_map(|x| {
                        let y = ys.iter().find(|y| y.peer == x.peer)?;
                        Some((x.peer.as_str(), x.median(), y.median()))
                    })
                    .collect();
                draw(&name, &|area| scatter(&area, &name, (x, y), &places))?;
            }
        }
        let mut names: Vec<(&str, &str)> = Vec::new();
        for series in &self.series {
            let name = (series.experiment.as_str(), series.name.as_str());
            if names.contains(&name) {
                continue;
            }
            names.push(name);
            let same = |s: &&Series| (s.experiment.as_str(), s.name.as_str()) == name;
            let all: Vec<&Series> = self.series.iter().filter(same).collect();
            let title = format!("{} {}", of_papers(name.0), name.1);
            draw(&title, &|area| lines(&area, &title, &all))?;
        }
        Ok(made)
    }
}

/// A file system, and where it is along both axes.
type Place<'a> = (&'a str, f64, f64);

/// The profile of a row, as its name ends.
fn profile_of(row: &[&Figure]) -> String {
    let profile = row[0].profile.map(|profile| format!(" {profile}"));
    profile.unwrap_or_default()
}

/// An experiment, and where the papers have it.
fn of_papers(experiment: &str) -> String {
    let found = PAPERS.iter().find(|(known, _)| *known == experiment);
    found.map_or(experiment.to_string(), |(_, papers)| {
        format!("{experiment} ({papers})")
    })
}

fn slug(name: &str) -> String {
    let plain = name.chars().map(|c| {
        if c.is_ascii_alphanumeric() {
            c.to_ascii_lowercase()
        } else {
            ' '
        }
    });
    let plain: String = plain.collect();
    plain.split_whitespace().collect::<Vec<_>>().join("-")
}

fn bars(area: &DrawingArea<SVGBackend<'_>, Shift>, title: &str, row: &[&Figure]) -> Drawn {
    area.fill(&WHITE)?;
    let most = row.iter().map(|f| f.median()).fold(0.0, f64::max);
    let least = row.iter().map(|f| f.median()).fold(0.0, f64::min);
    // An axis must have a length that its marks can divide.
    let most = if most - least < AXIS_LEAST {
        least + AXIS_LEAST
    } else {
        most
    };
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{title}, {}", row[0].unit), (FONT, 18))
        .margin(12)
        .x_label_area_size(28)
        .y_label_area_size(64)
        .build_cartesian_2d(
            (0..row.len() as i32 - 1).into_segmented(),
            least * 1.1..most * 1.1,
        )?;
    let label = |at: &SegmentValue<i32>| match at {
        SegmentValue::CenterOf(at) => {
            let figure = usize::try_from(*at).ok().and_then(|at| row.get(at));
            figure.map_or(String::new(), |figure| figure.peer.clone())
        }
        _ => String::new(),
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_label_formatter(&label)
        .x_labels(row.len())
        .draw()?;
    chart.draw_series(row.iter().enumerate().map(|(at, figure)| {
        let at = at as i32;
        let mut bar = Rectangle::new(
            [
                (SegmentValue::Exact(at), 0.0),
                (SegmentValue::Exact(at + 1), figure.median()),
            ],
            Palette99::pick(at as usize).filled(),
        );
        bar.set_margin(0, 0, 14, 14);
        bar
    }))?;
    area.present()?;
    Ok(())
}

/// Nearer to the lower left is better.
fn scatter(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    title: &str,
    (x, y): (&str, &str),
    places: &[Place<'_>],
) -> Drawn {
    area.fill(&WHITE)?;
    let range = |values: Vec<f64>| {
        let most = values.iter().copied().fold(AXIS_LEAST, f64::max);
        let positive = values.into_iter().filter(|value| *value > 0.0);
        positive.fold(most, f64::min) / 2.0..most * 3.0
    };
    let mut chart = ChartBuilder::on(area)
        .caption(title, (FONT, 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(
            range(places.iter().map(|(_, x, _)| *x).collect()).log_scale(),
            range(places.iter().map(|(.., y)| *y).collect()).log_scale(),
        )?;
    chart.configure_mesh().x_desc(x).y_desc(y).draw()?;
    chart.draw_series(places.iter().enumerate().map(|(at, (peer, x, y))| {
        EmptyElement::at((*x, *y))
            + Circle::new((0, 0), 5, Palette99::pick(at).filled())
            + Text::new((*peer).to_string(), (9, -6), (FONT, 14))
    }))?;
    area.present()?;
    Ok(())
}

fn lines(area: &DrawingArea<SVGBackend<'_>, Shift>, title: &str, all: &[&Series]) -> Drawn {
    area.fill(&WHITE)?;
    let points = || all.iter().flat_map(|series| series.points.iter());
    if points().count() < 2 {
        return Ok(());
    }
    let x_most = points().map(|p| p.0).fold(AXIS_LEAST, f64::max);
    let x_least = points().map(|p| p.0).fold(f64::MAX, f64::min).min(x_most);
    let y_most = points().map(|p| p.1).fold(AXIS_LEAST, f64::max);
    let y_least = points()
        .map(|p| p.1)
        .filter(|y| *y > 0.0)
        .fold(y_most, f64::min);
    let mut chart = ChartBuilder::on(area)
        .caption(title, (FONT, 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        // The values here differ by powers of ten.
        .build_cartesian_2d(x_least..x_most, (y_least / 2.0..y_most * 2.0).log_scale())?;
    chart
        .configure_mesh()
        .x_desc(all[0].along.as_str())
        .draw()?;
    for (at, series) in all.iter().enumerate() {
        let color = Palette99::pick(at).stroke_width(2);
        chart
            .draw_series(LineSeries::new(series.points.iter().copied(), color))?
            .label(series.peer.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color));
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::report::Better;

    #[test]
    fn every_row_and_series_is_drawn_also_where_nothing_was_counted() {
        let figure = |name: &str, peer: &str, value| Figure {
            experiment: "E1".into(),
            name: name.into(),
            unit: "x".into(),
            better: Better::Less,
            profile: None,
            peer: peer.into(),
            target: None,
            relative: None,
            values: vec![value],
        };
        let series = |peer: &str, points: &[(f64, f64)]| Series {
            experiment: "E2".into(),
            name: "clone (head,head)".into(),
            along: "round".into(),
            peer: peer.into(),
            points: points.into(),
        };
        let report = Report {
            scale: 1.0,
            seed: 1,
            rounds: 16,
            commands: Vec::new(),
            machine: BTreeMap::new(),
            figures: vec![
                figure("none", "ramet", 0.0),
                figure("none", "xfs", 0.0),
                figure("both ways", "ramet", -3.0),
                figure("both ways", "xfs", 2e9),
                figure("alone", "ramet", 1.0),
                figure(TRADEOFF.1, "ramet", 1.0),
                figure(TRADEOFF.1, "xfs", 200.0),
                figure(TRADEOFF.2, "ramet", 2.0),
                figure(TRADEOFF.2, "xfs", 15.0),
            ],
            series: vec![
                series("ramet", &[(1.0, 0.1), (2.0, 0.0)]),
                series("xfs", &[(1.0, 10.0), (2.0, 30.0)]),
            ],
            left_out: Vec::new(),
        };
        let dir = tempfile::tempdir().expect("a folder can be made");
        let made = report.plot(dir.path()).expect("it draws");
        let names: Vec<_> = made.iter().filter_map(|path| path.file_stem()).collect();
        let expected = [
            "e1-caw-figures-1-9-none",
            "e1-caw-figures-1-9-both-ways",
            "e1-caw-figures-1-9-space-per-byte-written-in-a-clone",
            "e1-caw-figures-1-9-cold-grep-of-the-clone",
            "e1-caw-figures-1-9-space-against-cold-grep-of-the-clone",
            "e2-caw-figures-2-10-clone-head-head",
        ];
        assert_eq!(names, expected);
        for path in made {
            let text = std::fs::read_to_string(path).expect("it was written");
            assert!(text.contains("ramet") && text.contains("xfs"), "{text}");
        }
    }
}
