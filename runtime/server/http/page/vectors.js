// Arithmetic on vectors.

const dot = (a, b) => a.reduce((sum, value, n) => sum + value * b[n], 0);

export const norm = (vector) => Math.sqrt(dot(vector, vector));

// From -1 to 1; 0 for a vector without a direction.
export function cosine(a, b) {
  const lengths = norm(a) * norm(b);
  return lengths ? dot(a, b) / lengths : 0;
}
