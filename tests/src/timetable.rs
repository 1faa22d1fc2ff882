//! Generates a school's timetable as a problem for tablix2, and checks the solution.
//!
//! The generator makes a valid timetable and removes its times and rooms, so a solution exists. Two
//! soft constraints (no holes, free first lessons) conflict, so no solution satisfies all
//! constraints. The search ends only after a number of populations without improvement.

use crate::rng::Rng;
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, HashSet};
use std::fmt::Write;

/// The numbers that determine the size of the problem.
#[derive(Clone, Copy, Debug)]
pub struct School {
    /// Number of classes; also the number of rooms.
    pub class_count: usize,
    pub teacher_count: usize,
    /// Days of a school week.
    pub day_count: usize,
    /// Number of lessons per day.
    pub lessons_per_day: usize,
    /// Number of lessons that take place at the same time, at most `class_count`.
    pub concurrent_lesson_count: usize,
}

/// The school of the demo. With [`FINISH_OPTION`] the search takes 30 to 60 seconds on two cores.
pub const DEMO_SCHOOL: School = School {
    class_count: 14,
    teacher_count: 18,
    day_count: 5,
    lessons_per_day: 7,
    concurrent_lesson_count: 10,
};
/// tablix2's option `finish`: number of populations without improvement after which a kernel of
/// tablix2 stops.
pub const FINISH_OPTION: &str = "finish=1300";

/// Returns a problem as XML for tablix2. The same school and seed give the same problem.
pub fn problem_xml(school: School, seed: u64) -> String {
    let mut rng = Rng::new(seed);
    let mut lesson_counts: BTreeMap<(usize, usize), u32> = BTreeMap::new();
    for _ in 0..school.day_count * school.lessons_per_day {
        let classes = rng.choose_different(school.class_count, school.concurrent_lesson_count);
        let teachers = rng.choose_different(school.teacher_count, school.concurrent_lesson_count);
        for class_and_teacher in classes.into_iter().zip(teachers) {
            *lesson_counts.entry(class_and_teacher).or_default() += 1;
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
        let class_option = "<option name=\"resourcetype\">class</option></module>";
        write_line(
            &mut xml,
            &format!("<module name=\"{module}\" weight=\"1\" mandatory=\"no\">{class_option}"),
        );
    }
    write_line(&mut xml, "</modules>\n<resources>\n<constant>");
    write_resources(&mut xml, "teacher", school.teacher_count);
    write_resources(&mut xml, "class", school.class_count);
    write_line(&mut xml, "</constant>\n<variable>");
    let day_and_period_options = format!(
        "<matrix width=\"{}\" height=\"{}\"/>",
        school.day_count, school.lessons_per_day
    );
    write_line(
        &mut xml,
        &format!("<resourcetype type=\"time\">{day_and_period_options}</resourcetype>"),
    );
    write_resources(&mut xml, "room", school.class_count);
    write_line(&mut xml, "</variable>\n</resources>\n<events>");
    for ((class, teacher), lesson_count) in lesson_counts {
        let resources = format!(
            "<resource type=\"teacher\" name=\"teacher{teacher}\"/><resource type=\"class\" name=\"class{class}\"/>"
        );
        write_line(
            &mut xml,
            &format!(
                "<event name=\"lesson{class}-{teacher}\" repeats=\"{lesson_count}\">{resources}</event>"
            ),
        );
    }
    xml.push_str("</events>\n</ttm>\n");
    xml
}

fn write_line(xml: &mut String, text: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(xml, "{text}");
}

fn write_resources(xml: &mut String, kind: &str, resource_count: usize) {
    let names: String = (0..resource_count)
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
    /// Number of lessons in the timetable.
    pub lesson_count: usize,
}

/// Parses the CSV of `tablix2_output` and checks the hard constraints: no teacher, class or room is
/// used twice at the same time.
///
/// # Errors
/// The file is malformed, or a hard constraint is violated; the error describes the first
/// violation.
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
    let mut used_slots = HashSet::new();
    let mut lesson_count = 0;
    for row in rows.filter(|row| row.len() > 1) {
        let [name, teacher, class, time, room] = row[..] else {
            bail!("not a lesson: {row:?}")
        };
        for resource in [teacher, class, room] {
            if !used_slots.insert((time.to_string(), resource.to_string())) {
                bail!("{resource} is needed twice at time {time} ({name})");
            }
        }
        lesson_count += 1;
    }
    Ok(Solution {
        fitness,
        lesson_count,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_has_every_lesson_of_its_timetable() {
        let xml = problem_xml(DEMO_SCHOOL, 1);
        let lesson_count_texts = xml
            .split("repeats=\"")
            .skip(1)
            .map(|rest| rest.split('"').next().expect("closed"));
        let lesson_count: usize = lesson_count_texts
            .map(|count| count.parse::<usize>().expect("a number"))
            .sum();
        assert_eq!(lesson_count, 5 * 7 * 10);
        assert_eq!(xml, problem_xml(DEMO_SCHOOL, 1));
        assert_ne!(xml, problem_xml(DEMO_SCHOOL, 2));
    }

    #[test]
    fn teacher_used_twice_is_no_solution() {
        let header = "\"Title\",\"x\"\n\"Fitness\",18\n\"Event name\",\"teacher\",\"class\",\"time\",\"room\"\n";
        let valid_csv = format!(
            "{header}\"a\",\"t0\",\"c0\",\"0 2\",\"r1\"\n\"b\",\"t1\",\"c1\",\"0 2\",\"r2\"\n"
        );
        assert_eq!(
            check_solution(&valid_csv).expect("good"),
            Solution {
                fitness: 18,
                lesson_count: 2
            }
        );
        let invalid_csv = format!("{valid_csv}\"c\",\"t0\",\"c2\",\"0 2\",\"r3\"\n");
        assert!(
            check_solution(&invalid_csv)
                .expect_err("twice")
                .to_string()
                .contains("t0")
        );
        assert!(check_solution("").is_err());
    }
}
