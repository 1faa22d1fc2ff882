//! The instances of Nugent, Vollmann and Ruml (1968), and those that others cut from them.
//!
//! Locations are the cells of a grid, row by row, with Manhattan distances. Flows are symmetric
//! tables of small numbers; a table here is its upper triangle without the diagonal, one digit
//! for each entry (A means 10), and `/` ends a row.

use crate::instance::{Cost, Instance};

const FLOWS_12: &str =
    "52410062111/3022204500/000055222/522A0055/A000511/511540/A5233/0050/0AA/50/2";
const FLOWS_15: &str = "A0510122220400/1322232020A50/A20254522555/11500210250/3555103055/\
     22150025A/60155510/52A0500/0A5A02/04005/5050/330/A2/4";
const FLOWS_20: &str = "05052A3155500544001/3A515124250AA305A5/20524450005100500/\
     105210A220215255/565252051115251/521600A0201015/0005A2251210A/11AA20A2522A/20355050002/\
     5505100552/5251A0225/2A501125/2210005/551550/305AA/0020/520/11/6";
const FLOWS_25: &str = "3200A505200205301A021110/40A0022150000016102251A/\
     3455514040403255200310/002206252511122420225/20000000020020502102/AA5A600A2A155250201/\
     13500245A605550550/A2520300040505225/560155523502AA15/012100006645322/20421062150015/\
     2103A00400425/450105000511/00220250525/2000635005/05515212A/52115655/4000050/544502/44102/\
     10A1/000/00/2";
const FLOWS_30: &str = "32002A50525002056301A0A211101/40A40022105000020161012251A5/\
     340555141040406325521003102/00022060252511112240202255/5200002000021002051021021/\
     12214AA25505000A00040A11/AA5AA600A21A15523502013/1350002452A60552505502/\
     A21520302004052052252/556015505235052AA152/001210200066045322A/55200002045A100001/\
     20422106215500155/21053A0042004255/451010502005110/0302202050525A/2200065350051/\
     512AA4005000/055105212AA/5213156553/401000500/50445025/0441022/550100/10A10/0000/00A/22/2";

/// An embedded instance with its known optimum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nugent {
    pub name: &'static str,
    /// Value of every optimal permutation.
    pub optimum: Cost,
    size: usize,
    /// Cells of a row of the grid. The last rows of the grid are missing or cut where `size`
    /// ends.
    columns: usize,
    flows: &'static str,
    facilities: Facilities,
}

/// Rows of the table of flows that an instance takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Facilities {
    First,
    /// The first four of every five.
    FourOfFive,
}

const fn cut(
    name: &'static str,
    optimum: Cost,
    (size, columns): (usize, usize),
    flows: &'static str,
) -> Nugent {
    Nugent {
        name,
        optimum,
        size,
        columns,
        flows,
        facilities: Facilities::First,
    }
}

/// All embedded instances, ascending by size.
pub const INSTANCES: [Nugent; 15] = [
    cut("nug12", 578, (12, 4), FLOWS_12),
    cut("nug14", 1014, (14, 5), FLOWS_15),
    cut("nug15", 1150, (15, 5), FLOWS_15),
    cut("nug16a", 1610, (16, 5), FLOWS_20),
    Nugent {
        name: "nug16b",
        optimum: 1240,
        size: 16,
        columns: 4,
        flows: FLOWS_20,
        facilities: Facilities::FourOfFive,
    },
    cut("nug17", 1732, (17, 5), FLOWS_20),
    cut("nug18", 1930, (18, 5), FLOWS_20),
    cut("nug20", 2570, (20, 5), FLOWS_20),
    cut("nug21", 2438, (21, 7), FLOWS_30),
    cut("nug22", 3596, (22, 11), FLOWS_30),
    cut("nug24", 3488, (24, 6), FLOWS_30),
    cut("nug25", 3744, (25, 5), FLOWS_25),
    cut("nug27", 5234, (27, 9), FLOWS_30),
    cut("nug28", 5166, (28, 7), FLOWS_30),
    cut("nug30", 6124, (30, 6), FLOWS_30),
];

/// Returns the embedded instance of this name.
pub fn find(name: &str) -> Option<Nugent> {
    INSTANCES.into_iter().find(|nugent| nugent.name == name)
}

impl Nugent {
    /// Returns the instance. The first matrix holds distances, the second flows, so that a
    /// permutation gives the facility of each location.
    pub fn instance(&self) -> Instance {
        let size = self.size;
        let mut distances = Vec::with_capacity(size * size);
        let mut flows = Vec::with_capacity(size * size);
        for i in 0..size {
            for j in 0..size {
                distances.push(self.distance(i, j));
                flows.push(self.flow(i, j));
            }
        }
        Instance::new(size, distances, flows)
            .unwrap_or_else(|error| unreachable!("embedded instance {}: {error}", self.name))
    }

    fn distance(&self, i: usize, j: usize) -> i32 {
        let rows = (i / self.columns).abs_diff(j / self.columns);
        let columns = (i % self.columns).abs_diff(j % self.columns);
        i32::try_from(rows + columns).unwrap_or(i32::MAX)
    }

    fn flow(&self, i: usize, j: usize) -> i32 {
        if i == j {
            return 0;
        }
        let (i, j) = (self.table_row(i.min(j)), self.table_row(i.max(j)));
        let row = self.flows.split('/').nth(i).unwrap_or_default();
        let digit = row.as_bytes().get(j - i - 1).copied().unwrap_or(b'0');
        i32::try_from(char::from(digit).to_digit(11).unwrap_or_default()).unwrap_or_default()
    }

    fn table_row(&self, facility: usize) -> usize {
        match self.facilities {
            Facilities::First => facility,
            Facilities::FourOfFive => facility / 4 * 5 + facility % 4,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instance::parse_solution;

    #[test]
    fn tables_have_the_shape_of_a_triangle() {
        for (flows, size) in [
            (FLOWS_12, 12),
            (FLOWS_15, 15),
            (FLOWS_20, 20),
            (FLOWS_25, 25),
            (FLOWS_30, 30),
        ] {
            let lengths: Vec<usize> = flows.split('/').map(str::len).collect();
            assert_eq!(lengths, (1..size).rev().collect::<Vec<_>>());
            assert!(
                flows
                    .bytes()
                    .all(|digit| matches!(digit, b'0'..=b'9' | b'A' | b'/'))
            );
        }
    }

    #[test]
    fn known_permutations_have_the_known_optimum() {
        for (name, permutation) in [
            ("nug12", "12 7 9 3 4 8 11 1 5 6 10 2"),
            (
                "nug20",
                "18 14 10 3 9 4 2 12 11 16 19 15 20 8 13 17 5 7 1 6",
            ),
        ] {
            let nugent = find(name).expect("an embedded instance");
            let text = format!("{} {} {permutation}", nugent.size, nugent.optimum);
            let solution = parse_solution(&text).expect("a solution");
            assert_eq!(
                nugent.instance().evaluate(&solution.permutation),
                nugent.optimum
            );
        }
    }
}
