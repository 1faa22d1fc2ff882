//! Generates a school's timetable as a problem for tablix2, and checks the solution.
//!
//! The generator makes a valid timetable and removes its times and rooms, so a solution exists. Two
//! soft constraints (no holes, free first lessons) conflict, so the search ends only when there has
//! been no improvement for some time.

use crate::rng::Rng;
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, HashSet};
use std::fmt::Write;

/// The size of the school.
#[derive(Clone, Copy, Debug)]
pub struct School {
    /// Number of classes; also the number of rooms.
    pub classes: usize,
    pub teachers: usize,
    /// Days of a school week.
    pub days: usize,
    /// Number of lessons per day.
    pub lessons_per_day: usize,
    /// Number of lessons that take place at the same time, at most `classes`.
    pub concurrent_lessons: usize,
}

/// The school of the demo. With [`FINISH_OPTION`] the search takes 30 to 60 seconds on two cores.
pub const DEMO_SCHOOL: School = School {
    classes: 14,
    teachers: 18,
    days: 5,
    lessons_per_day: 7,
    concurrent_lessons: 10,
};
/// tablix2's option `finish`: number of populations without improvement after which a kernel stops.
pub const FINISH_OPTION: &str = "finish=1300";

/// Returns the problem as XML for tablix2.
pub fn problem(school: School, seed: u64) -> String {
    let mut rng = Rng::new(seed);
    let mut events: BTreeMap<(usize, usize), u32> = BTreeMap::new();
    for _ in 0..school.days * school.lessons_per_day {
        let classes = rng.choose(school.classes, school.concurrent_lessons);
        let teachers = rng.choose(school.teachers, school.concurrent_lessons);
        for pair in classes.into_iter().zip(teachers) {
            *events.entry(pair).or_default() += 1;
        }
    }
    let mut xml = String::from(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ttm version=\"0.2.0\">\n\
         <info><title>Timetable</title><address>Any town</address><author>Sempa demo</author></info>\n<modules>\n",
    );
    for module in ["sametime", "timeplace"] {
        write_line(
            &mut xml,
            &format!("<module name=\"{module}\" weight=\"60\" mandatory=\"yes\"/>"),
        );
    }
    for module in ["holes", "freemorning"] {
        let wish = "<option name=\"resourcetype\">class</option></module>";
        write_line(
            &mut xml,
            &format!("<module name=\"{module}\" weight=\"1\" mandatory=\"no\">{wish}"),
        );
    }
    write_line(&mut xml, "</modules>\n<resources>\n<constant>");
    write_resources(&mut xml, "teacher", school.teachers);
    write_resources(&mut xml, "class", school.classes);
    write_line(&mut xml, "</constant>\n<variable>");
    let matrix = format!(
        "<matrix width=\"{}\" height=\"{}\"/>",
        school.days, school.lessons_per_day
    );
    write_line(
        &mut xml,
        &format!("<resourcetype type=\"time\">{matrix}</resourcetype>"),
    );
    write_resources(&mut xml, "room", school.classes);
    write_line(&mut xml, "</variable>\n</resources>\n<events>");
    for ((class, teacher), repeats) in events {
        let who = format!(
            "<resource type=\"teacher\" name=\"teacher{teacher}\"/><resource type=\"class\" name=\"class{class}\"/>"
        );
        write_line(
            &mut xml,
            &format!("<event name=\"lesson{class}-{teacher}\" repeats=\"{repeats}\">{who}</event>"),
        );
    }
    xml.push_str("</events>\n</ttm>\n");
    xml
}

fn write_line(xml: &mut String, text: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(xml, "{text}");
}

fn write_resources(xml: &mut String, kind: &str, count: usize) {
    let names: String = (0..count)
        .map(|i| format!("<resource name=\"{kind}{i}\"/>"))
        .collect();
    write_line(
        xml,
        &format!("<resourcetype type=\"{kind}\">{names}</resourcetype>"),
    );
}

/// A solution that violates no hard constraint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Solution {
    /// tablix2's measure of the violated soft constraints; lower is better.
    pub fitness: u64,
    /// The number of lessons in the table.
    pub lessons: usize,
}

/// Parses the CSV of `tablix2_output` and checks the hard constraints: no teacher, class or room is
/// used twice at the same time.
///
/// # Errors
/// The file is malformed, or a hard constraint is violated; the error names it.
pub fn check_solution(csv: &str) -> Result<Solution> {
    let mut rows = csv.lines().map(|line| {
        line.split(',')
            .map(|field| field.trim_matches('"'))
            .collect::<Vec<_>>()
    });
    let fitness = rows
        .by_ref()
        .find(|row| row[0] == "Fitness")
        .context("no fitness in the result")?;
    let fitness = fitness
        .get(1)
        .context("no fitness in the result")?
        .parse()?;
    rows.by_ref()
        .find(|row| row[0] == "Event name")
        .context("no lessons in the result")?;
    let mut taken = HashSet::new();
    let mut lessons = 0;
    for row in rows.filter(|row| row.len() > 1) {
        let [name, teacher, class, time, room] = row[..] else {
            bail!("not a lesson: {row:?}")
        };
        for who in [teacher, class, room] {
            if !taken.insert((time.to_string(), who.to_string())) {
                bail!("{who} is needed twice at time {time} ({name})");
            }
        }
        lessons += 1;
    }
    Ok(Solution { fitness, lessons })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_has_every_lesson_of_its_timetable() {
        let xml = problem(DEMO_SCHOOL, 1);
        let repeats = xml
            .split("repeats=\"")
            .skip(1)
            .map(|rest| rest.split('"').next().expect("closed"));
        let lessons: usize = repeats
            .map(|number| number.parse::<usize>().expect("a number"))
            .sum();
        assert_eq!(lessons, 5 * 7 * 10);
        assert_eq!(xml, problem(DEMO_SCHOOL, 1));
        assert_ne!(xml, problem(DEMO_SCHOOL, 2));
    }

    #[test]
    fn teacher_used_twice_is_no_solution() {
        let head = "\"Title\",\"x\"\n\"Fitness\",18\n\"Event name\",\"teacher\",\"class\",\"time\",\"room\"\n";
        let good = format!(
            "{head}\"a\",\"t0\",\"c0\",\"0 2\",\"r1\"\n\"b\",\"t1\",\"c1\",\"0 2\",\"r2\"\n"
        );
        assert_eq!(
            check_solution(&good).expect("good"),
            Solution {
                fitness: 18,
                lessons: 2
            }
        );
        let bad = format!("{good}\"c\",\"t0\",\"c2\",\"0 2\",\"r3\"\n");
        assert!(
            check_solution(&bad)
                .expect_err("twice")
                .to_string()
                .contains("t0")
        );
        assert!(check_solution("").is_err());
    }
}
