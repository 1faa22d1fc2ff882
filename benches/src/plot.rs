//! Draws line charts as SVG, with logarithmic axes or with linear axes from zero.

use serde::Serialize;
use std::fmt::Write;

/// A line of a chart.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Series {
    /// Name of the line in the legend.
    pub(crate) name: String,
    /// (x, y) pairs. Both are positive if the axes are logarithmic.
    pub(crate) points: Vec<(f64, f64)>,
    /// (x, 99th percentile of y) pairs; empty if not measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) p99: Vec<(f64, f64)>,
}

/// A line chart with its labels.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Chart {
    /// File name without extension.
    pub(crate) name: String,
    pub(crate) title: String,
    /// Label of the x axis.
    pub(crate) x: String,
    /// Label of the y axis.
    pub(crate) y: String,
    /// True if y is a rate, false if it is a time.
    pub(crate) more_is_better: bool,
    pub(crate) series: Vec<Series>,
}

const WIDTH: f64 = 820.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 210.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 56.0;
/// Colours that people with colour vision deficiency can distinguish.
const COLOURS: [&str; 8] = [
    "#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a00",
];

/// Scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scale {
    /// Equal factors have equal distances.
    Logarithmic,
    /// Equal differences have equal distances.
    Linear,
}

/// An axis of a chart. A logarithmic one extends between the powers of ten that enclose all values;
/// a linear one extends from zero to a round number above the largest value.
struct Axis {
    scale: Scale,
    /// Value at the beginning of the axis; its base-10 logarithm on a logarithmic axis.
    low: f64,
    /// Value at the end of the axis; its base-10 logarithm on a logarithmic axis.
    high: f64,
    /// Distance between two grid lines, in units of the axis.
    step: f64,
    start_coordinate: f64,
    end_coordinate: f64,
}

/// Maximum number of grid lines on a linear axis.
const GRID_LINES_MAX: f64 = 8.0;

impl Axis {
    fn enclosing(
        scale: Scale,
        values: impl Iterator<Item = f64> + Clone,
        from: f64,
        to: f64,
    ) -> Axis {
        let least = values.clone().fold(f64::INFINITY, f64::min);
        let most = values.fold(0.0, f64::max);
        if scale == Scale::Logarithmic {
            let low = least.log10().floor();
            return Axis {
                scale,
                low,
                high: most.log10().ceil().max(low + 1.0),
                step: 1.0,
                start_coordinate: from,
                end_coordinate: to,
            };
        }
        let most = if most > 0.0 { most } else { 1.0 };
        let tenth = 10f64.powf((most / GRID_LINES_MAX).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .map(|part| part * tenth)
            .into_iter()
            .find(|step| most / step <= GRID_LINES_MAX);
        let step = step.unwrap_or(10.0 * tenth);
        Axis {
            scale,
            low: 0.0,
            high: step * (most / step).ceil().max(1.0),
            step,
            start_coordinate: from,
            end_coordinate: to,
        }
    }

    fn position(&self, value: f64) -> f64 {
        let value = if self.scale == Scale::Logarithmic {
            value.log10()
        } else {
            value
        };
        let part = (value - self.low) / (self.high - self.low);
        self.start_coordinate + part * (self.end_coordinate - self.start_coordinate)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let lines = ((self.high - self.low) / self.step).round() as u32;
        let at = move |line: u32| self.low + self.step * f64::from(line);
        (0..=lines).map(move |line| {
            if self.scale == Scale::Logarithmic {
                10f64.powf(at(line))
            } else {
                at(line)
            }
        })
    }
}

impl Chart {
    /// Draws the chart with logarithmic axes. Returns `None` if the chart has no points.
    pub(crate) fn logarithmic_svg(&self) -> Option<String> {
        self.draw(Scale::Logarithmic, true)
    }

    /// Draws the chart with linear axes. Point markers are omitted, because the lines of such
    /// charts have many points. Returns `None` if the chart has no points.
    pub(crate) fn linear_svg(&self) -> Option<String> {
        self.draw(Scale::Linear, false)
    }

    fn draw(&self, scale: Scale, marked: bool) -> Option<String> {
        let points = || self.series.iter().flat_map(|series| series.points.iter());
        points().next()?;
        let x = Axis::enclosing(scale, points().map(|point| point.0), LEFT, WIDTH - RIGHT);
        let y = Axis::enclosing(scale, points().map(|point| point.1), HEIGHT - BOTTOM, TOP);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        );
        write_text(
            &mut svg,
            LEFT,
            24.0,
            "start",
            &format!("{}", BoldText(&self.title)),
        );
        write_text(
            &mut svg,
            (LEFT + WIDTH - RIGHT) / 2.0,
            HEIGHT - 14.0,
            "middle",
            &escape_xml(&self.x),
        );
        let turned = format!("transform=\"rotate(-90 16 {0})\"", HEIGHT / 2.0);
        let _ = writeln!(
            svg,
            "<text x=\"16\" y=\"{}\" text-anchor=\"middle\" {turned}>{}</text>",
            HEIGHT / 2.0,
            escape_xml(&self.y)
        );
        for tick in x.ticks() {
            write_grid_line(
                &mut svg,
                (x.position(tick), y.start_coordinate),
                (x.position(tick), y.end_coordinate),
            );
            write_text(
                &mut svg,
                x.position(tick),
                y.start_coordinate + 18.0,
                "middle",
                &tick_label(tick),
            );
        }
        for tick in y.ticks() {
            write_grid_line(
                &mut svg,
                (x.start_coordinate, y.position(tick)),
                (x.end_coordinate, y.position(tick)),
            );
            write_text(
                &mut svg,
                x.start_coordinate - 6.0,
                y.position(tick) + 4.0,
                "end",
                &tick_label(tick),
            );
        }
        self.write_series(&mut svg, &x, &y, marked);
        svg.push_str("</svg>\n");
        Some(svg)
    }

    /// Writes the lines of all series with their legend.
    fn write_series(&self, svg: &mut String, x: &Axis, y: &Axis, marked: bool) {
        for (number, (series, colour)) in self.series.iter().zip(COLOURS.iter().cycle()).enumerate()
        {
            let line: Vec<String> = series
                .points
                .iter()
                .map(|(a, b)| format!("{:.1},{:.1}", x.position(*a), y.position(*b)))
                .collect();
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                line.join(" ")
            );
            for (a, b) in series.points.iter().filter(|_| marked) {
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"><title>{}: {a} {b:.3}</title></circle>",
                    x.position(*a),
                    y.position(*b),
                    escape_xml(&series.name)
                );
            }
            let (left, line) = (WIDTH - RIGHT + 16.0, TOP + 10.0 + 20.0 * number as f64);
            let _ = writeln!(
                svg,
                "<rect x=\"{left}\" y=\"{}\" width=\"14\" height=\"4\" fill=\"{colour}\"/>",
                line - 6.0
            );
            write_text(svg, left + 20.0, line, "start", &escape_xml(&series.name));
        }
    }
}

struct BoldText<'a>(&'a str);

impl std::fmt::Display for BoldText<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "<tspan font-weight=\"bold\">{}</tspan>",
            escape_xml(self.0)
        )
    }
}

/// Escapes text for XML.
fn escape_xml(words: &str) -> String {
    words
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

fn write_text(svg: &mut String, x: f64, y: f64, anchor: &str, inside: &str) {
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{inside}</text>"
    );
}

fn write_grid_line(svg: &mut String, from: (f64, f64), to: (f64, f64)) {
    let _ = writeln!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"#dddddd\"/>",
        from.0, from.1, to.0, to.1
    );
}

/// Formats a tick value with a unit prefix.
fn tick_label(value: f64) -> String {
    for (unit, name) in [(1e9, "G"), (1e6, "M"), (1e3, "k")] {
        if value >= unit {
            return format!("{}{name}", value / unit);
        }
    }
    format!("{}", (value * 1e9).round() / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>) -> Chart {
        let series = vec![Series {
            name: "a & b".into(),
            points,
            ..Series::default()
        }];
        Chart {
            name: "c".into(),
            title: "t".into(),
            x: "x".into(),
            y: "y".into(),
            more_is_better: false,
            series,
        }
    }

    /// Points are between the axes; larger values are further to the right and further up.
    #[test]
    fn points_lie_inside_axes() {
        let svg = chart(vec![(8.0, 0.3), (1e6, 200.0)])
            .logarithmic_svg()
            .expect("two points");
        let line = svg
            .lines()
            .find(|line| line.starts_with("<polyline"))
            .expect("a line");
        let numbers = line.split('"').nth(1).expect("points").replace(' ', ",");
        let places: Vec<f64> = numbers
            .split(',')
            .map(|word| word.parse().expect("a number"))
            .collect();
        assert!(places[0] < places[2] && places[1] > places[3]);
        assert!(
            places[0] >= LEFT
                && places[2] <= WIDTH - RIGHT
                && places[3] >= TOP
                && places[1] <= HEIGHT - BOTTOM
        );
        assert!(svg.contains("a &amp; b") && !svg.contains("a & b"));
    }

    /// A single point is drawn; a chart without points is not.
    #[test]
    fn empty_chart_is_not_drawn() {
        assert!(
            chart(vec![(10.0, 10.0)])
                .logarithmic_svg()
                .expect("one point")
                .contains("<circle")
        );
        assert!(chart(Vec::new()).logarithmic_svg().is_none());
    }

    /// Linear axes begin at zero and end at a round number.
    #[test]
    fn linear_axes_span_zero_to_round_number() {
        let axis =
            |most: f64| Axis::enclosing(Scale::Linear, [most / 3.0, most].into_iter(), 0.0, 100.0);
        for (most, high, lines) in [
            (814.0, 1000.0, 6),
            (0.3, 0.3, 7),
            (8.0, 8.0, 9),
            (0.0, 1.0, 6),
        ] {
            let axis = axis(most);
            assert!(
                (axis.high - high).abs() < 1e-9 && axis.ticks().count() == lines,
                "{most}: {}",
                axis.high
            );
            assert_eq!((axis.position(0.0), axis.position(axis.high)), (0.0, 100.0));
        }
        assert!(
            chart(vec![(0.0, 0.0), (168.0, 400.0)])
                .linear_svg()
                .expect("two points")
                .contains("<polyline")
        );
    }

    /// Powers of ten are written with unit prefixes.
    #[test]
    fn tick_labels_use_prefixes() {
        assert_eq!(
            [0.1, 1.0, 100.0, 1e3, 1e7].map(tick_label),
            ["0.1", "1", "100", "1k", "10M"]
        );
    }
}
