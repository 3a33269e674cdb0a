//! Grouped bars with their spread, and lines over time, as PNG.

use std::path::Path;
use std::sync::OnceLock;

use anyhow::{Context, anyhow};
use plotters::prelude::*;
use plotters::style::FontStyle;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::statistics::Spread;

/// A bar and its whiskers; none leaves a gap.
pub type Bar = Option<Spread>;

/// One picture of a plot.
#[derive(Debug, Clone)]
pub struct Panel {
    /// What the bars show, and in which unit.
    pub title: String,
    /// Names of the bars in a group, in their order, and the number of the colour that each has in all panels.
    pub series: Vec<(String, usize)>,
    /// Groups with a bar for each series.
    pub groups: Vec<(String, Vec<Bar>)>,
}

/// One picture of lines over time.
#[derive(Debug, Clone)]
pub struct Lines {
    /// What they show, and in which unit.
    pub title: String,
    /// What lies along the other axis, and in which unit.
    pub along: String,
    /// A name and its points, from left to right.
    pub series: Vec<(String, Vec<(f64, f64)>)>,
    /// Where something changes.
    pub marks: Vec<f64>,
}

/// Size of one panel, in pixels.
const PANEL: (u32, u32) = (1400, 420);

/// Colours of the series, told apart also without colour vision (Okabe and Ito's palette).
const COLOURS: [RGBColor; 8] = [
    RGBColor(120, 120, 120),
    RGBColor(230, 159, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(240, 228, 66),
];

/// Where the DejaVu fonts are on Debian, Fedora and Arch.
const FONT_PLACES: [&str; 3] = [
    "/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf",
    "/usr/share/fonts/dejavu-sans-fonts/DejaVuSans.ttf",
    "/usr/share/fonts/TTF/DejaVuSans.ttf",
];

/// Room for the legend to the right of the bars, in pixels: for its frame and its colours, and for each letter.
const LEGEND_FRAME_PIXELS: usize = 50;
const LEGEND_LETTER_PIXELS: usize = 9;
/// What a panel's margins and its axis take of its width.
const MARGINS_PIXELS: usize = 84;

const FONT: &str = "sans-serif";

/// Draws panels below each other.
///
/// # Errors
/// When no font is installed or the file cannot be written.
pub fn draw(path: &Path, panels: &[Panel]) -> anyhow::Result<()> {
    load_font()?;
    let height = PANEL.1 * u32::try_from(panels.len())?;
    let root = BitMapBackend::new(path, (PANEL.0, height)).into_drawing_area();
    let draw_all = || -> Result<(), Box<dyn std::error::Error>> {
        root.fill(&WHITE)?;
        for (area, panel) in root.split_evenly((panels.len(), 1)).iter().zip(panels) {
            draw_panel(area, panel)?;
        }
        root.present()?;
        Ok(())
    };
    draw_all().map_err(|error| anyhow!("cannot draw {}: {error}", path.display()))
}

/// Draws one picture of lines.
///
/// # Errors
/// As [`draw`].
pub fn draw_lines(path: &Path, lines: &Lines) -> anyhow::Result<()> {
    load_font()?;
    let root = BitMapBackend::new(path, PANEL).into_drawing_area();
    let draw_all = || -> Result<(), Box<dyn std::error::Error>> {
        root.fill(&WHITE)?;
        draw_lines_in(&root, lines)?;
        root.present()?;
        Ok(())
    };
    draw_all().map_err(|error| anyhow!("cannot draw {}: {error}", path.display()))
}

fn draw_lines_in(area: &Area<'_>, lines: &Lines) -> Result<(), Box<dyn std::error::Error>> {
    let points = || lines.series.iter().flat_map(|(_, points)| points);
    let right = points().map(|point| point.0).fold(1.0, f64::max);
    let top = points().map(|point| point.1).fold(f64::MIN_POSITIVE, f64::max) * 1.1;
    let mut chart = ChartBuilder::on(area)
        .caption(&lines.title, (FONT, 22))
        .margin(12)
        .x_label_area_size(45)
        .y_label_area_size(60)
        // The legend stands to the right of the lines.
        .build_cartesian_2d(0.0..right * 1.15, 0.0..top)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc(lines.along.as_str())
        .x_label_style((FONT, 16))
        .y_label_style((FONT, 16))
        .draw()?;
    for mark in &lines.marks {
        chart.draw_series([PathElement::new([(*mark, 0.0), (*mark, top)], BLACK.mix(0.4).stroke_width(1))])?;
    }
    for (index, (name, points)) in lines.series.iter().enumerate() {
        let style = COLOURS[index % COLOURS.len()].stroke_width(2);
        chart
            .draw_series([PathElement::new(points.clone(), style)])?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 12, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .label_font((FONT, 16))
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    Ok(())
}

fn load_font() -> anyhow::Result<()> {
    // Fonts are registered for the life of the process.
    static LOADED: OnceLock<bool> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| {
        let bytes = FONT_PLACES.iter().find_map(|place| std::fs::read(place).ok());
        bytes.is_some_and(|bytes| {
            plotters::style::register_font(FONT, FontStyle::Normal, Box::leak(bytes.into_boxed_slice())).is_ok()
        })
    });
    loaded.then_some(()).context("no font for the plot: run `make setup`, or install the package fonts-dejavu-core")
}

type Area<'a> = DrawingArea<BitMapBackend<'a>, plotters::coord::Shift>;

fn draw_panel(area: &Area<'_>, panel: &Panel) -> Result<(), Box<dyn std::error::Error>> {
    let bars = panel.groups.iter().flat_map(|(_, bars)| bars.iter().flatten());
    let top = bars.map(|spread| spread.max).fold(f64::MIN_POSITIVE, f64::max) * 1.1;
    let groups = panel.groups.len() as f64;
    let letters = panel.series.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let legend = (LEGEND_FRAME_PIXELS + LEGEND_LETTER_PIXELS * letters) as f64;
    let bars = (f64::from(PANEL.0) - MARGINS_PIXELS as f64 - legend).max(legend);
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, (FONT, 22))
        .margin(12)
        .x_label_area_size(30)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..(groups * (1.0 + legend / bars)).max(1.0), 0.0..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .light_line_style(WHITE)
        .y_label_style((FONT, 16))
        .draw()?;

    let width = 0.8 / panel.series.len().max(1) as f64;
    for (index, (name, colour)) in panel.series.iter().enumerate() {
        let colour = COLOURS[colour % COLOURS.len()];
        let left = move |group: usize| group as f64 + 0.1 + index as f64 * width;
        let spreads =
            panel.groups.iter().enumerate().filter_map(|(group, (_, bars))| Some((group, (*bars.get(index)?)?)));
        let spreads: Vec<(usize, Spread)> = spreads.collect();
        chart
            .draw_series(spreads.iter().map(|(group, spread)| {
                Rectangle::new([(left(*group), 0.0), (left(*group) + width * 0.9, spread.median)], colour.filled())
            }))?
            .label(name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 6), (x + 12, y + 6)], colour.filled()));
        chart.draw_series(spreads.iter().map(|(group, spread)| {
            let middle = left(*group) + width * 0.45;
            PathElement::new([(middle, spread.min), (middle, spread.max)], BLACK.stroke_width(2))
        }))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .label_font((FONT, 16))
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    let plotting = chart.plotting_area();
    let style = TextStyle::from((FONT, 16).into_font()).pos(Pos::new(HPos::Center, VPos::Top));
    for (group, (name, _)) in panel.groups.iter().enumerate() {
        let (x, y) = plotting.map_coordinate(&(group as f64 + 0.5, 0.0));
        // The labels stand below the axis, outside the area that its coordinates describe.
        let (origin_x, origin_y) = area.get_base_pixel();
        area.draw(&Text::new(name.clone(), (x - origin_x, y - origin_y + 8), style.clone()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_is_a_png_of_its_size() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("plot.png");
        let spread = |median| Some(Spread { median, min: median / 2.0, max: median * 2.0 });
        let panel = Panel {
            title: "a title".to_owned(),
            series: vec![("one".to_owned(), 0), ("two".to_owned(), 5)],
            groups: vec![("first".to_owned(), vec![spread(1.0), None]), ("second".to_owned(), vec![None, spread(2.0)])],
        };
        let empty = Panel { title: String::new(), series: Vec::new(), groups: Vec::new() };
        draw(&path, &[panel, empty]).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(&bytes[..8], b"\x89PNG\r\n\x1a\n");
        assert_eq!(bytes[16..20], PANEL.0.to_be_bytes());
        assert_eq!(bytes[20..24], (PANEL.1 * 2).to_be_bytes());
    }

    #[test]
    fn lines_are_a_png_also_without_points() {
        let directory = tempfile::tempdir().unwrap();
        for series in
            [Vec::new(), vec![("one".to_owned(), vec![(0.0, 1.0), (1.0, 2.0)]), ("none".to_owned(), Vec::new())]]
        {
            let path = directory.path().join("lines.png");
            let lines = Lines { title: "a title".to_owned(), along: "time, s".to_owned(), series, marks: vec![0.5] };
            draw_lines(&path, &lines).unwrap();
            let bytes = std::fs::read(&path).unwrap();
            assert_eq!((&bytes[..8], &bytes[16..20]), (&b"\x89PNG\r\n\x1a\n"[..], &PANEL.0.to_be_bytes()[..]));
        }
    }
}
