//! Curves, and their pictures as SVG: both axes logarithmic, because what matters here are factors.

use serde::Serialize;
use std::fmt::Write;

/// One line of a picture.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Series {
    /// Its name in the legend.
    pub(crate) name: String,
    /// (x, y), both above 0.
    pub(crate) points: Vec<(f64, f64)>,
    /// The same of what 99 of 100 do not exceed, where that is known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) p99: Vec<(f64, f64)>,
}

/// A picture.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Chart {
    /// Its file's name.
    pub(crate) name: String,
    /// What it shows.
    pub(crate) title: String,
    /// What the axes mean.
    pub(crate) x: String,
    /// See above.
    pub(crate) y: String,
    /// What y tells is a rate and not a time.
    pub(crate) more_is_better: bool,
    /// The lines.
    pub(crate) series: Vec<Series>,
}

const WIDTH: f64 = 820.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 210.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 56.0;
/// Colours that people with any kind of sight tell apart.
const COLOURS: [&str; 8] = ["#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a00"];

/// A logarithmic axis: from the power of ten below the least value to the one above the greatest.
struct Axis {
    low: i32,
    high: i32,
    from: f64,
    to: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64> + Clone, from: f64, to: f64) -> Axis {
        let least = values.clone().fold(f64::INFINITY, f64::min);
        let most = values.fold(0.0, f64::max);
        let low = least.log10().floor() as i32;
        Axis { low, high: (most.log10().ceil() as i32).max(low + 1), from, to }
    }

    fn place(&self, value: f64) -> f64 {
        let part = (value.log10() - f64::from(self.low)) / f64::from(self.high - self.low);
        self.from + part * (self.to - self.from)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        (self.low..=self.high).map(|power| 10f64.powi(power))
    }
}

impl Chart {
    /// The picture, or nothing if no line has a point.
    pub(crate) fn svg(&self) -> Option<String> {
        let points = || self.series.iter().flat_map(|series| series.points.iter());
        points().next()?;
        let x = Axis::over(points().map(|point| point.0), LEFT, WIDTH - RIGHT);
        let y = Axis::over(points().map(|point| point.1), HEIGHT - BOTTOM, TOP);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        );
        text(&mut svg, LEFT, 24.0, "start", &format!("{}", Bold(&self.title)));
        text(&mut svg, (LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 14.0, "middle", &safe(&self.x));
        let turned = format!("transform=\"rotate(-90 16 {0})\"", HEIGHT / 2.0);
        let _ = writeln!(
            svg,
            "<text x=\"16\" y=\"{}\" text-anchor=\"middle\" {turned}>{}</text>",
            HEIGHT / 2.0,
            safe(&self.y)
        );
        for tick in x.ticks() {
            stroke(&mut svg, (x.place(tick), y.from), (x.place(tick), y.to));
            text(&mut svg, x.place(tick), y.from + 18.0, "middle", &amount(tick));
        }
        for tick in y.ticks() {
            stroke(&mut svg, (x.from, y.place(tick)), (x.to, y.place(tick)));
            text(&mut svg, x.from - 6.0, y.place(tick) + 4.0, "end", &amount(tick));
        }
        for (number, (series, colour)) in self.series.iter().zip(COLOURS.iter().cycle()).enumerate() {
            let line: Vec<String> =
                series.points.iter().map(|(a, b)| format!("{:.1},{:.1}", x.place(*a), y.place(*b))).collect();
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                line.join(" ")
            );
            for (a, b) in &series.points {
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"><title>{}: {a} {b:.3}</title></circle>",
                    x.place(*a),
                    y.place(*b),
                    safe(&series.name)
                );
            }
            let (left, line) = (WIDTH - RIGHT + 16.0, TOP + 10.0 + 20.0 * number as f64);
            let _ =
                writeln!(svg, "<rect x=\"{left}\" y=\"{}\" width=\"14\" height=\"4\" fill=\"{colour}\"/>", line - 6.0);
            text(&mut svg, left + 20.0, line, "start", &safe(&series.name));
        }
        svg.push_str("</svg>\n");
        Some(svg)
    }
}

struct Bold<'a>(&'a str);

impl std::fmt::Display for Bold<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "<tspan font-weight=\"bold\">{}</tspan>", safe(self.0))
    }
}

/// Text in XML.
fn safe(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, inside: &str) {
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{inside}</text>");
}

fn stroke(svg: &mut String, from: (f64, f64), to: (f64, f64)) {
    let _ = writeln!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"#dddddd\"/>",
        from.0, from.1, to.0, to.1
    );
}

/// A power of ten for people.
fn amount(value: f64) -> String {
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
        let series = vec![Series { name: "a & b".into(), points, ..Series::default() }];
        Chart { name: "c".into(), title: "t".into(), x: "x".into(), y: "y".into(), more_is_better: false, series }
    }

    #[test]
    fn points_lie_between_the_axes_and_grow_to_the_right_and_upwards() {
        let svg = chart(vec![(8.0, 0.3), (1e6, 200.0)]).svg().expect("two points");
        let line = svg.lines().find(|line| line.starts_with("<polyline")).expect("a line");
        let numbers = line.split('"').nth(1).expect("points").replace(' ', ",");
        let places: Vec<f64> = numbers.split(',').map(|word| word.parse().expect("a number")).collect();
        assert!(places[0] < places[2] && places[1] > places[3]);
        assert!(places[0] >= LEFT && places[2] <= WIDTH - RIGHT && places[3] >= TOP && places[1] <= HEIGHT - BOTTOM);
        assert!(svg.contains("a &amp; b") && !svg.contains("a & b"));
    }

    #[test]
    fn a_single_point_is_drawn_and_none_is_no_picture() {
        assert!(chart(vec![(10.0, 10.0)]).svg().expect("one point").contains("<circle"));
        assert!(chart(Vec::new()).svg().is_none());
    }

    #[test]
    fn powers_of_ten_are_short() {
        assert_eq!([0.1, 1.0, 100.0, 1e3, 1e7].map(amount), ["0.1", "1", "100", "1k", "10M"]);
    }
}
